"""Measures this machine, and transformers with the same prompts, as the reference for `outrider bench`.

    python benchmarks/reference.py [--json FILE]

It prints three figures, all in tokens per second. The floor is the measured read bandwidth divided
by the bytes of the weights: the speed of a single stream if only reading weights took time.
`generate` is transformers' own loop, with one prompt after the other. Continuous batching is
transformers' `generate_batch` with 16 prompts at once. Run this script right before and
after a benchmark, since machines differ, and one machine's speed changes from hour to hour.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from outrider.bench.machine import CpuMeter, describe_machine, others_cpu_share
from outrider.bench.prompts import DEFAULT_PROMPTS, BenchPrompt, load_prompts
from outrider.client import ChatMessage
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, resolve_device
from outrider.model_hub.load import resolve_dtype
from outrider.model_hub.locate import locate_model

BANDWIDTH_BYTES = 1 << 29  # much larger than any cache
BANDWIDTH_PASSES = 8
PAGE_SIZE_TOKENS = 64
BATCH_TOKENS = 1024

TokenIds = list[int]
Model = Any  # a model of transformers, whose type annotations are incomplete


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The speed if a token took only the time to read every weight once."""

    weight_bytes: int
    bandwidth_bytes_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStream:
    """The figures of `generate`, with one prompt after the other."""

    num_prompts: int
    num_generated_tokens: int
    tokens_per_second: float  # all tokens divided by the total time, which includes prefill
    decode_tokens_per_second: float  # speed of one answer after its first token, as the median over prompts
    ttft_seconds: float  # median over prompts
    others_cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """The figures of continuous batching, with many concurrent prompts."""

    num_prompts: int
    max_requests_per_batch: int
    num_generated_tokens: int
    tokens_per_second: float  # all tokens divided by the time from adding the first prompt to the last token
    others_cpu_share: float


def main() -> int:
    arguments = parse_arguments()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = ModelConfig(id=arguments.model, dtype=arguments.dtype)
    directory = locate_model(config).directory
    model, dtype = load(directory, config)
    prompts = encode(directory, load_prompts(arguments.prompts))
    machine = describe_machine()
    result: dict[str, Any] = {
        "machine": asdict(machine),
        "model": config.id,
        "dtype": dtype,
        "num_threads": torch.get_num_threads(),
        "max_new_tokens": arguments.max_tokens,
    }
    print(f"{machine.processor}, {machine.num_cores} cores, {machine.system}, commit {machine.commit or '?'}")
    print(f"{config.id} in {dtype}, {torch.get_num_threads()} threads, {arguments.max_tokens} new tokens, greedy\n")

    floor = measure_floor(model, num_threads=arguments.threads)
    result["floor"] = asdict(floor)
    print(
        f"floor                {floor.tokens_per_second:7.1f} tokens/s"
        f"   ({floor.weight_bytes / 1e6:.0f} MB of weights at {floor.bandwidth_bytes_per_second / 1e9:.1f} GB/s)",
        flush=True,
    )
    single = measure_generate(model, spread(prompts, arguments.single), max_new_tokens=arguments.max_tokens)
    result["generate"] = asdict(single)
    print(
        f"generate             {single.tokens_per_second:7.1f} tokens/s"
        f"   ({single.decode_tokens_per_second:.1f} after the first token, TTFT {1000 * single.ttft_seconds:.0f} ms, "
        f"{single.num_prompts} prompts, others' CPU {single.others_cpu_share:.0%})",
        flush=True,
    )
    if arguments.batch:
        batched = measure_batched(
            model, prompts, max_new_tokens=arguments.max_tokens, max_requests_per_batch=arguments.batch
        )
        result["continuous_batching"] = asdict(batched)
        print(
            f"continuous batching  {batched.tokens_per_second:7.1f} tokens/s"
            f"   ({batched.num_prompts} prompts, {batched.max_requests_per_batch} at once, "
            f"others' CPU {batched.others_cpu_share:.0%})",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default=ModelConfig().id, help="as for `outrider up` (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens for each prompt (default: 128)")
    parser.add_argument("--single", type=int, default=9, help="prompts for `generate` (default: 9)")
    parser.add_argument("--batch", type=int, default=16, help="prompts at once; 0 leaves batching out (default: 16)")
    parser.add_argument("--threads", type=int, default=describe_machine().num_cores, help="(default: all cores)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def load(directory: Path, config: ModelConfig) -> tuple[Model, str]:
    """Returns the model as transformers itself runs it, and the name of its dtype."""
    device = resolve_device(config.device)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    dtype = resolve_dtype(
        config.dtype, device, model.config, is_native=choose_model_kernels(config, device).library is not None
    )
    return model.to(device=device, dtype=getattr(torch, dtype)).eval(), dtype


def encode(directory: Path, prompts: Sequence[BenchPrompt]) -> list[TokenIds]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [_encode_one(tokenizer, prompt) for prompt in prompts]


def _encode_one(tokenizer: Any, prompt: BenchPrompt) -> TokenIds:
    """Returns the prompt's ids. For a model without a chat template, messages are joined by blank lines."""
    if isinstance(prompt.content, str):
        return list(tokenizer(prompt.content).input_ids)
    messages = [{"role": m.role, "content": m.content} for m in prompt.content if isinstance(m, ChatMessage)]
    if tokenizer.chat_template is None:
        return list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def spread(prompts: Sequence[TokenIds], count: int) -> list[TokenIds]:
    """Returns `count` of the prompts, evenly spaced, so that all kinds are included."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def measure_floor(model: Model, *, num_threads: int) -> Floor:
    """Measures the floor. Tied weights count once, since only the output layer reads the whole embedding."""
    storages = {p.untyped_storage().data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    weight_bytes = sum(storages.values())
    bandwidth = read_bandwidth(num_threads)
    return Floor(
        weight_bytes=weight_bytes,
        bandwidth_bytes_per_second=bandwidth,
        tokens_per_second=bandwidth / weight_bytes,
    )


class MemoryReader:
    """Reads a large buffer in several ways, to measure the current read speed of this machine's memory."""

    def __init__(self, num_threads: int) -> None:
        buffer = np.ones(BANDWIDTH_BYTES // 8, dtype=np.int64)
        parts = np.array_split(buffer, num_threads)
        as_float = torch.from_numpy(buffer).view(torch.float32)
        self._pool = pool = ThreadPoolExecutor(num_threads)

        def reduce_with(operation: np.ufunc) -> Callable[[], object]:
            return lambda: list(pool.map(operation.reduce, parts))

        self._ways: tuple[Callable[[], object], ...] = (
            reduce_with(np.add),
            reduce_with(np.bitwise_or),
            lambda: torch.sum(as_float),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the buffer and the threads."""
        self._pool.shutdown()
        self._ways = ()

    def bytes_per_second(self) -> float:
        """Runs each way once, and returns the best speed."""
        return BANDWIDTH_BYTES / min(_seconds(way) for way in self._ways)


def read_bandwidth(num_threads: int) -> float:
    """Returns the read bandwidth in bytes per second, the best of several passes."""
    with MemoryReader(num_threads) as memory:
        return max(memory.bytes_per_second() for _ in range(BANDWIDTH_PASSES))


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


class _TokenClock(BaseStreamer):
    """Records when each token arrives. The first call of `put` has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def greedy(max_new_tokens: int, model: Model) -> Any:
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    make: Any = GenerationConfig  # its constructor is untyped
    return make(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=0)


@torch.inference_mode()
def measure_generate(model: Model, prompts: Sequence[TokenIds], *, max_new_tokens: int) -> SingleStream:
    generation = greedy(max_new_tokens, model)
    inputs = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    model.generate(inputs[0], generation_config=greedy(8, model))  # warm-up
    meter = CpuMeter(())
    clocks = []
    started_at = time.perf_counter()
    for token_ids in inputs:
        clock = _TokenClock()
        sent_at = time.perf_counter()
        model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), generation_config=generation, streamer=clock
        )
        clocks.append([at - sent_at for at in clock.times[1:]])  # [num_generated] seconds
    wall_seconds = time.perf_counter() - started_at
    num_generated = sum(len(times) for times in clocks)
    rates = [(len(times) - 1) / (times[-1] - times[0]) for times in clocks if len(times) > 1]
    return SingleStream(
        num_prompts=len(prompts),
        num_generated_tokens=num_generated,
        tokens_per_second=num_generated / wall_seconds,
        decode_tokens_per_second=median(rates) if rates else 0.0,
        ttft_seconds=median(times[0] for times in clocks),
        others_cpu_share=others_cpu_share([meter.stop()]),
    )


def batching_config(*, longest_tokens: int, max_requests_per_batch: int) -> ContinuousBatchingConfig:
    """Returns a configuration for concurrent sequences of `longest_tokens` tokens each, prompt plus answer."""
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE_TOKENS,
        num_blocks=max_requests_per_batch * math.ceil(longest_tokens / PAGE_SIZE_TOKENS) + max_requests_per_batch,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=max_requests_per_batch,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )


def measure_batched(
    model: Model, prompts: Sequence[TokenIds], *, max_new_tokens: int, max_requests_per_batch: int
) -> Batched:
    """Measures continuous batching. Raises: RuntimeError if a prompt is not answered."""
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    config = batching_config(longest_tokens=longest, max_requests_per_batch=max_requests_per_batch)
    model.generate_batch(
        [list(prompts[0])], generation_config=greedy(4, model), continuous_batching_config=config
    )  # warm-up
    meter = CpuMeter(())
    outputs = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=greedy(max_new_tokens, model),
        continuous_batching_config=config,
        record_timestamps=True,
    )
    reading = meter.stop()
    failed = [output.error for output in outputs.values() if output.error is not None]
    if failed or len(outputs) < len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} prompts were answered; errors: {failed[:1]}")
    started_at = min(output.created_time for output in outputs.values())
    ended_at = max(output.timestamps[-1] for output in outputs.values() if output.timestamps)
    num_generated = sum(len(output.generated_tokens) for output in outputs.values())
    return Batched(
        num_prompts=len(prompts),
        max_requests_per_batch=max_requests_per_batch,
        num_generated_tokens=num_generated,
        tokens_per_second=num_generated / (ended_at - started_at),
        others_cpu_share=others_cpu_share([reading]),
    )


if __name__ == "__main__":
    sys.exit(main())
