"""Computes a Llama step's minimum time on a GPU, from its bytes, and its expected time, from its kernels.

    python3 checks/gpu_floor.py                  # the table for Llama-3.1-8B on an H100, in Markdown
    python3 checks/gpu_floor.py --kernels 42 --products 7 --host-ms 0.5 --host-us 20    # for other code

The floor is the time to read, once and at the speed of a large copy, all weights except the embedding, and the keys and
values of the running sequences. The rest of the expected time is an estimate: see `Machine`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

BATCHES = (1, 8, 32, 128)
OTHER_KERNELS = 4
"""Number of kernels outside of layers: embedding, choice of rows, last norm, logits as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a decoder of the Llama shape, named as in transformers' configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    itemsize: int = 2  # bytes of one weight, and of one element of a key or value

    @property
    def kv_size(self) -> int:
        """Number of elements of a token's key, or of its value, in one layer."""
        return self.num_key_value_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def layer_weights(self) -> tuple[int, ...]:
        """Number of weights in each of a layer's fused products: query-key-value, output, gate-up, down."""
        hidden, middle = self.hidden_size, self.intermediate_size
        return (
            hidden * (self.query_size + 2 * self.kv_size),
            self.query_size * hidden,
            2 * hidden * middle,
            middle * hidden,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding's. The output layer's are read even if tied."""
        weights = self.num_hidden_layers * sum(self.layer_weights) + self.hidden_size * self.vocab_size
        return self.itemsize * weights

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_hidden_layers * self.kv_size * self.itemsize

    def step_bytes(self, num_seqs: int, context: int) -> int:
        """Returns the minimum bytes that a step reads for `num_seqs` sequences of `context` tokens each."""
        return self.weight_bytes + num_seqs * context * self.kv_bytes_per_token


LLAMA_8B = Sizes(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU and the overheads of its kernels, as measured on an H200 (benchmarks/log/gpu-2026-11-27.md).

    The time between two kernels of a graph, 1 µs, is part of each kernel's time.
    """

    bytes_per_second: float = 3.0e12
    flops: float = 0.8e15  # per second, in bfloat16 products
    product_overhead: float = 1.0  # the time of a product relative to that of reading its bytes
    product_us: float = 3.6  # of each product, in addition
    small_us: float = 2.8
    small_us_a_row: float = 0.0055
    attention_overhead: float = 1.64
    attention_us: float = 14.2  # minimum per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The kernels that a step launches, and the host's work between two steps."""

    products_per_layer: int = 4
    kernels_per_layer: int = 10  # including products, attention and the merge of its splits
    host_ms: float = 0.1  # half is measured by benchmarks.host_gap; half is for the driver's launch and read
    host_us_per_seq: float = 0.7
    sampler_ms: float = 0.06
    sampler_us_per_seq: float = 1.2


@dataclass(frozen=True, slots=True)
class Prediction:
    """The times of one step, in milliseconds."""

    floor: float
    products: float
    small_kernels: float
    attention: float
    sampler: float
    host: float

    @property
    def total(self) -> float:
        return self.products + self.small_kernels + self.attention + self.sampler + self.host

    @property
    def times_floor(self) -> float:
        return self.total / self.floor


def floor_ms(sizes: Sizes, num_seqs: int, context: int, bytes_per_second: float) -> float:
    """Returns the floor in milliseconds. No step is faster, unless its data are in a cache."""
    return 1e3 * sizes.step_bytes(num_seqs, context) / bytes_per_second


def predict(sizes: Sizes, num_seqs: int, context: int, *, machine: Machine, code: Code) -> Prediction:
    """Predicts a decoding step of `num_seqs` sequences with one row each."""

    def product_ms(weights: float) -> float:
        bytes_ms = 1e3 * weights * sizes.itemsize / machine.bytes_per_second * machine.product_overhead
        flops_ms = 1e3 * 2 * weights * num_seqs / machine.flops * 1.4
        return max(bytes_ms, flops_ms) + 1e-3 * machine.product_us

    layers = sizes.num_hidden_layers
    # Unfused products read the same bytes in more launches.
    products = layers * sum(map(product_ms, sizes.layer_weights)) + product_ms(sizes.hidden_size * sizes.vocab_size)
    products += 1e-3 * layers * (code.products_per_layer - len(sizes.layer_weights)) * machine.product_us
    small = layers * (code.kernels_per_layer - code.products_per_layer - 1) + OTHER_KERNELS
    kv_ms = 1e3 * num_seqs * context * sizes.kv_bytes_per_token / machine.bytes_per_second
    return Prediction(
        floor=floor_ms(sizes, num_seqs, context, machine.bytes_per_second),
        products=products,
        small_kernels=1e-3 * small * (machine.small_us + num_seqs * machine.small_us_a_row),
        attention=max(kv_ms * machine.attention_overhead, 1e-3 * layers * machine.attention_us),
        sampler=code.sampler_ms + 1e-3 * num_seqs * code.sampler_us_per_seq,
        host=code.host_ms + 1e-3 * num_seqs * code.host_us_per_seq,
    )


def table(machine: Machine, code: Code, context: int) -> str:
    """Returns the predictions as a table in Markdown."""
    lines = [
        "| sequences | floor, ms | products | small kernels | attention | sampler | host | step, ms | × floor |",
        "| -- | -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for num_seqs in BATCHES:
        each = predict(LLAMA_8B, num_seqs, context, machine=machine, code=code)
        parts = each.floor, each.products, each.small_kernels, each.attention, each.sampler, each.host, each.total
        lines.append(f"| {num_seqs} | " + " | ".join(f"{part:.2f}" for part in parts) + f" | {each.times_floor:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    code, machine = Code(), Machine()
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--kernels", type=int, default=code.kernels_per_layer, help="of a layer, products included")
    parser.add_argument("--products", type=int, default=code.products_per_layer, help="of a layer")
    parser.add_argument("--host-ms", type=float, default=code.host_ms, help="between two steps")
    parser.add_argument("--host-us", type=float, default=code.host_us_per_seq, help="the same, for each sequence")
    parser.add_argument("--bandwidth", type=float, default=machine.bytes_per_second / 1e12, help="TB/s of a copy")
    arguments = parser.parse_args(argv)
    machine = Machine(bytes_per_second=1e12 * arguments.bandwidth)
    code = Code(
        products_per_layer=arguments.products,
        kernels_per_layer=arguments.kernels,
        host_ms=arguments.host_ms,
        host_us_per_seq=arguments.host_us,
    )
    print(table(machine, code, arguments.context))
    return 0


if __name__ == "__main__":
    sys.exit(main())
