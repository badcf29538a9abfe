"""Measures one forward pass of a model: by shape, by phase, and by batch size and context.

    .venv/bin/python benchmarks/forward.py [--model ID] [--variants native,int8] [--growth | --trees] [--svg FILE]

Variants are interleaved, shape by shape. A shape is sequences x rows: 16x5 verifies four
draft tokens for each of sixteen sequences. Times are medians, with the minimum in brackets,
in milliseconds. The floor is the time to read the first variant's weights once at the memory's
read speed, which is measured between the passes. Compare the medians of passes with the floor's median.
`--growth` instead runs one variant through batches of 1 to 64 sequences and contexts
of 100 to 8000 tokens, and `--svg` draws both curves. `--trees` compares draft trees of six
tokens with chains of six.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from reference import MemoryReader

from outrider.bench.machine import describe_machine
from outrider.engine.attention import make_attention_backend
from outrider.engine.cpu_kernels.adapter import NativeAdapter
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_weights import PACKED
from outrider.engine.cpu_kernels.packing import MATRICES
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.low_rank import LowRank
from outrider.engine.model_runner import make_runner
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model

BLOCK_SIZE = 16
CONTEXT = 300
VARIANTS = {
    "native": {},
    "mapped": {},  # native kernels, with weights memory-mapped from the cache, as in nodes
    "features": {},  # like `mapped`, plus the outputs of three layers (taps), reduced to one feature vector per row
    "adapter": {},  # like `native`, with an adapter of rank 16 for all rows
    "adapters": {},  # the same, with one for each sequence
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "dequantized": {"weights": "dequantized"},  # of a quantised checkpoint
    "float32": {"dtype": "float32"},
    "torch": {"kernels": "torch"},
}
TAPS = FeatureReduction(taps=(2, 15, 27), hidden_size=576, projection=torch.eye(3 * 576)[::3])  # for the default model
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (100, 300, 1000, 2000, 4000, 8000)
TREES = {
    "chain": (),
    "chain of three, three siblings": (-1, 0, 1, -1, 0, 1),
    "two chains of three": (-1, 0, 1, -1, 3, 4),
    "six siblings": (-1, -1, -1, -1, -1, -1),
}
TREE_CONTEXTS = (100, 300, 2000)
ADAPTER_RANK = 16
SECONDS_FOR_SHAPE = 0.6  # per round


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a step, which computes the last `num_rows` of `context` tokens of each sequence."""

    num_seqs: int
    num_rows: int
    context: int = CONTEXT
    parents: tuple[int, ...] = ()  # parents of the last rows, if these rows are a draft tree

    def __str__(self) -> str:
        if self.num_rows == self.context:
            return f"prefill of {self.context}"
        return f"{self.num_seqs}x{self.num_rows}" + (f" at {self.context}" if self.context != CONTEXT else "")


SHAPES = (Shape(1, 1), Shape(1, 5), Shape(4, 1), Shape(4, 5), Shape(16, 1), Shape(16, 5), Shape(1, 250, 250))


class Variant:
    """A loaded model, and a cache with room for `most` tokens of each sequence."""

    def __init__(self, name: str, model: str, *, num_seqs: int, most: int) -> None:
        self.name = name
        load = open_model if name in {"mapped", "features"} else load_model
        features = TAPS if name == "features" else None
        self.loaded: LoadedModel = load(ModelConfig(id=model, **VARIANTS[name])).with_features(features)
        blocks = -(-most // BLOCK_SIZE)
        cache = PagedKVCache(
            self.loaded.spec.planes,
            layer_groups=self.loaded.spec.layer_groups,
            num_blocks=num_seqs * blocks,
            block_size=BLOCK_SIZE,
            kernels=self.loaded.cpu_kernels,
        )
        num_adapters = {"adapter": 1, "adapters": num_seqs}.get(name, 0)
        self.adapters = [random_adapter(self.loaded, seed) for seed in range(num_adapters)] or [None]
        self.runner = make_runner(self.loaded, cache, make_attention_backend(), features=features)
        self.block_ids = [list(range(seq * blocks, (seq + 1) * blocks)) for seq in range(num_seqs)]
        self.token_ids = torch.randint(0, self.loaded.spec.vocab_size, (most,)).tolist()
        for seq in range(num_seqs):
            for start in range(0, most, 512):
                self._forward([self._rows(seq, Shape(1, min(512, most - start), min(start + 512, most)))])

    def seconds(self, shape: Shape) -> float:
        rows = [self._rows(seq, shape) for seq in range(shape.num_seqs)]
        return self._forward(rows)

    def phases(self, shape: Shape, passes: int = 5) -> dict[str, float]:
        """Returns the calling thread's time per pass in milliseconds, by phase; empty if phases are unknown."""
        self.runner.phases.start()
        for _ in range(passes):
            self.seconds(shape)
        spent = self.runner.phases.take()
        self.runner.phases.stop()
        return {name: nanoseconds / 1e6 / passes for name, nanoseconds in spent.items()}

    def _rows(self, seq: int, shape: Shape) -> SequenceRows:
        start = shape.context - shape.num_rows
        num_logits = 1 if shape.num_rows == shape.context else shape.num_rows
        tokens, adapter = self.token_ids[start : shape.context], self.adapters[seq % len(self.adapters)]
        return SequenceRows(tokens, start, self.block_ids[seq], num_logits, shape.parents, adapter)

    def _forward(self, rows: list[SequenceRows]) -> float:
        batch = build_input_batch(rows, BLOCK_SIZE)
        started = time.perf_counter()
        self.runner.forward(batch)
        return time.perf_counter() - started


def random_adapter(model: LoadedModel, seed: int) -> NativeAdapter:
    """Returns an adapter of all linear layers of a native decoder, for time only."""
    assert isinstance(model.native, NativeDecoder), "adapters are measured with the native decoder"
    random, shape, parts = np.random.default_rng(seed), model.native.weights.shape, {}
    kv_size = shape.num_kv_heads * shape.head_dim
    for index in range(model.spec.num_layers):
        for matrix, names in MATRICES.items():
            size = shape.matrix_sizes[f"{index}.{matrix}"]
            rest = {"qkv": [kv_size, kv_size], "gate_up": [shape.intermediate_size]}.get(matrix, [])
            for name, out_features in zip(names[1:] or names, [size.out_features - sum(rest), *rest], strict=True):
                down, up = (
                    random.normal(0.0, 0.01, each).astype(np.float32)
                    for each in ((ADAPTER_RANK, size.in_features), (out_features, ADAPTER_RANK))
                )
                parts[f"model.layers.{index}.{name}"] = LowRank(down, up)
    return NativeAdapter(shape, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_ID, help="a model.id; default %(default)s")
    parser.add_argument("--variants", default="native,float32,int8,torch", help="of " + ", ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="batches and contexts instead, of the first variant")
    parser.add_argument("--trees", action="store_true", help="draft trees instead, with the first variant")
    parser.add_argument("--svg", type=Path, help="with --growth: draw the curves into this file")
    arguments = parser.parse_args()
    names = arguments.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    machine = describe_machine()
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    torch.manual_seed(0)
    if arguments.growth:
        return measure_growth(names[0], arguments.model, arguments.rounds, arguments.svg)
    if arguments.trees:
        return measure_trees(names[0], arguments.model, arguments.rounds)
    variants = [Variant(name, arguments.model, num_seqs=16, most=CONTEXT + 8) for name in names]
    with MemoryReader(machine.num_cores) as memory:
        times, bandwidths = measure(variants, SHAPES, arguments.rounds, memory)
    print_floor(variants[0], bandwidths)
    print(f"{'':12}" + "".join(f"{variant.name:>20}" for variant in variants))
    for shape in SHAPES:
        cells = (f"{in_words(times[variant.name, shape]):>20}" for variant in variants)
        print(f"{shape!s:12}" + "".join(cells), flush=True)
    for variant in variants:
        for shape in SHAPES:
            phases = variant.phases(shape)
            print(f"{variant.name} {shape}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in phases.items()))
    return 0


def measure_growth(name: str, model: str, rounds: int, svg: Path | None) -> int:
    batches = [Shape(num_seqs, 1) for num_seqs in BATCHES]
    variant = Variant(name, model, num_seqs=BATCHES[-1], most=CONTEXT + 8)
    with MemoryReader(describe_machine().num_cores) as memory:
        by_batch, bandwidths = measure([variant], batches, rounds, memory)
        print_floor(variant, bandwidths)
        variant = Variant(name, model, num_seqs=1, most=CONTEXTS[-1])
        by_context, bandwidths = measure([variant], [Shape(1, 1, context) for context in CONTEXTS], rounds, memory)
        print_floor(variant, bandwidths)
    points = []
    for title, times in (("sequences", by_batch), ("context", by_context)):
        for (_, shape), seconds in times.items():
            size = shape.num_seqs if title == "sequences" else shape.context
            per_row = 1e3 * median(seconds) / shape.num_seqs
            print(f"{title} {size:5}  {in_words(seconds)} ms, {per_row:.2f} a row", flush=True)
        sizes = BATCHES if title == "sequences" else CONTEXTS
        points.append((title, list(zip(sizes, (1e3 * median(seconds) for seconds in times.values()), strict=True))))
    if svg is not None:
        svg.write_text(draw(points), encoding="utf-8")
    return 0


def measure_trees(name: str, model: str, rounds: int) -> int:
    variant = Variant(name, model, num_seqs=4, most=TREE_CONTEXTS[-1] + 16)
    for num_seqs in (1, 4):
        for context in TREE_CONTEXTS:
            shapes = {"no draft": Shape(num_seqs, 1, context)}
            shapes |= {tree: Shape(num_seqs, 7, context + 6, parents) for tree, parents in TREES.items()}
            times: dict[str, list[float]] = {tree: [] for tree in shapes}
            until = time.perf_counter() + rounds * SECONDS_FOR_SHAPE
            while time.perf_counter() < until:
                for tree, shape in shapes.items():
                    times[tree].append(variant.seconds(shape))
            for tree, seconds in times.items():
                print(f"{num_seqs} x {context:4} {tree:32} {in_words(seconds)} ms", flush=True)
    return 0


def measure(
    variants: Sequence[Variant], shapes: Sequence[Shape], rounds: int, memory: MemoryReader
) -> tuple[dict[tuple[str, Shape], list[float]], list[float]]:
    """Returns the seconds of each pass, and the memory bandwidths measured in between, in bytes per second."""
    times: dict[tuple[str, Shape], list[float]] = {(v.name, shape): [] for v in variants for shape in shapes}
    bandwidths: list[float] = []
    for _ in range(rounds):
        for shape in shapes:
            bandwidths.append(memory.bytes_per_second())
            for variant in variants:
                until = time.perf_counter() + SECONDS_FOR_SHAPE
                variant.seconds(shape)  # warm-up, since caches hold another shape's rows
                while not times[variant.name, shape] or time.perf_counter() < until:
                    times[variant.name, shape].append(variant.seconds(shape))
    return times, bandwidths


def print_floor(variant: Variant, bandwidths: Sequence[float]) -> None:
    native = variant.loaded.native
    if isinstance(native, NativeDecoder):
        blobs = native.weights.blobs
        num_bytes = sum(blob.nbytes for name, blob in blobs.items() if name.endswith(f".{PACKED}"))
        seconds = [num_bytes / bandwidth for bandwidth in bandwidths]
        print(
            f"floor of {variant.name}: {in_words(seconds)} ms to read {num_bytes / 1e6:.0f} MB "
            f"at {median(bandwidths) / 1e9:.1f} ({max(bandwidths) / 1e9:.1f}) GB/s"
        )


def in_words(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ({1e3 * min(seconds):.1f})"


def draw(charts: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
    """Returns an SVG of charts side by side. Each plots milliseconds against a size; both axes start at zero."""
    width, height, margin = 360, 240, 50
    parts = []
    for index, (title, points) in enumerate(charts):
        left, bottom = index * (width + 2 * margin) + margin, margin + height
        max_x, max_y = max(x for x, _ in points), max(y for _, y in points)
        places = [(left + width * x / max_x, bottom - height * y / max_y, y) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts += [
            f'<path d="M{left} {margin}V{bottom}H{left + width}" fill="none" stroke="#888"/>',
            f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>',
            f'<text x="{left + width / 2}" y="{bottom + 34}" text-anchor="middle">{title}</text>',
            f'<text x="{left}" y="{margin - 12}">ms of a step</text>',
        ]
        for (x, y, ms), (size, _) in zip(places, points, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#06c"/>')
            if size >= max_x / 8:
                parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{size}</text>')
                parts.append(f'<text x="{x - 6:.1f}" y="{y - 8:.1f}" text-anchor="end">{ms:.1f}</text>')
    size = f'width="{len(charts) * (width + 2 * margin)}" height="{height + 2 * margin}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
