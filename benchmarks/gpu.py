"""A model on a GPU, as a report to paste into an issue: step times against the bandwidth floor, verification, generate.

    .venv/bin/python -m benchmarks.gpu --model meta-llama/Llama-3.1-8B-Instruct [--report gpu-report.md]

The floor of a step is the time to read all weights, and the keys and values of its sequences, once, at the speed of a
large copy on the same device. Times are medians of whole steps: batch, forward pass, race, and tokens on the host.
With --draft the three lines follow: plain decoding, a drafter beside the target, and one across a network.
`busy` is the share of a step in which the device computes, by torch's profiler. `--device cpu` runs the same on a CPU,
to try the script.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from benchmarks.three_lines.lines import Comparison, as_text, compare_lines
from benchmarks.three_lines.models import ModelPair
from outrider.bench.machine import describe_machine
from outrider.bench.prompts import DEFAULT_PROMPTS
from outrider.engine.attention import make_attention_backend
from outrider.engine.device import device_type
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner, warm_up
from outrider.engine.sampler import Sampler, SampleRows
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import attention_of
from outrider.model_hub.load import load_model
from outrider.request import SamplingParams

BATCHES = (1, 8, 32, 128)
VERIFIED_ROWS = (4, 8)
PACKAGES = ("torch", "triton", "flash-attn", "transformers")
COPY_BYTES = 1 << 30
LINES_BLOCKS = 1024
LINES_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a step: `num_rows` of each sequence."""

    num_seqs: int
    num_rows: int


class Node:
    """A loaded model with sequences of `context` tokens in its cache."""

    def __init__(self, config: ModelConfig, *, num_seqs: int, context: int) -> None:
        self.loaded = load_model(config)
        self.spec, self.device = self.loaded.spec, self.loaded.device
        heads = {"num_heads": self.spec.num_heads, "num_kv_heads": self.spec.num_kv_heads}
        attention = make_attention_backend(attention_of(config, self.device), self.device, self.spec.dtype, **heads)
        self.block_size = KVCacheConfig().block_size
        self.context = context
        blocks = -(-(context + max(VERIFIED_ROWS)) // self.block_size)
        self.cache = PagedKVCache(
            self.spec.planes,
            num_blocks=num_seqs * blocks,
            block_size=self.block_size,
            device=self.device,
            num_scratch_blocks=1,
        )
        self.runner = make_runner(
            self.loaded, self.cache, attention, graphs=GraphShapes() if config.cuda_graphs else None
        )
        warm_up(self.runner, self.cache, self.spec.max_model_len)
        self.sampler = Sampler(
            vocab_size=self.spec.vocab_size,
            known_token_ids=self.loaded.known_token_ids,
            device=self.device,
            kernels=self.loaded.cpu_kernels,
        )
        self.state = self.sampler.start(
            SamplingParams(seed=1, max_tokens=context), sample=0, prompt_token_ids=[1, 2, 3]
        )
        self.tables = [range(seq * blocks, (seq + 1) * blocks) for seq in range(num_seqs)]
        self.token_ids = torch.randint(0, self.spec.vocab_size, (context + max(VERIFIED_ROWS),)).tolist()
        for table in self.tables:
            for start in range(0, context, 512):
                rows = SequenceRows(self.token_ids[start : min(start + 512, context)], start, table, 0)
                self.runner.forward(build_input_batch([rows], self.block_size))

    def step(self, shape: Shape) -> None:
        """One step, until its tokens are on the host."""
        start = self.context - 1
        token_ids = self.token_ids[start : start + shape.num_rows]
        rows = [SequenceRows(token_ids, start, table, shape.num_rows) for table in self.tables[: shape.num_seqs]]
        logits = self.runner.forward(build_input_batch(rows, self.block_size))
        asked = SampleRows(self.state, self.context, tuple(token_ids[1:]))
        self.sampler.sample(logits, [asked] * shape.num_seqs)

    def floor_bytes(self, shape: Shape) -> int:
        """What a step cannot do without reading: all weights but the embedding's, keys and values."""
        model = self.loaded.model
        assert model is not None
        tensors = {
            each.data_ptr(): each.numel() * each.element_size()
            for module in model.modules()
            for each in (*module.parameters(recurse=False), *vars(module).values())
            if isinstance(each, torch.Tensor) and each.layout is torch.strided  # not what oneDNN has packed
        }
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if embedding.data_ptr() != output.data_ptr():
            tensors.pop(embedding.data_ptr(), None)
        return sum(tensors.values()) + shape.num_seqs * self.context * self.spec.bytes_per_token

    def seconds(self, shape: Shape, repeats: int) -> float:
        """The median of a step, after three that do not count."""
        times = []
        for _ in range(repeats + 3):
            started = time.perf_counter()
            self.step(shape)
            times.append(time.perf_counter() - started)
        return median(times[3:])

    def busy(self, shape: Shape, repeats: int = 5) -> float | None:
        """The share of time in which the device computes; None on a CPU."""
        if device_type(self.device) != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            started = time.perf_counter()
            for _ in range(repeats):
                self.step(shape)
            passed = time.perf_counter() - started
        return sum(event.self_device_time_total for event in profile.key_averages()) * 1e-6 / passed


def bytes_per_second(device: str) -> float:
    """Of a large copy, reads and writes together: the best of ten."""
    source = torch.ones(
        COPY_BYTES if device_type(device) == "cuda" else COPY_BYTES >> 4, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        wait(device)
        started = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * source.numel() / best


def wait(device: str) -> None:
    if device_type(device) == "cuda":
        torch.cuda.synchronize(device)


def generate_seconds(node: Node, num_seqs: int, num_tokens: int) -> float:
    """A token of each sequence by transformers' own generate, with its own attention and cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        node.loaded.directory, dtype=getattr(torch, node.spec.dtype), device_map={"": node.device}
    )
    prompt = torch.tensor([node.token_ids[: node.context]] * num_seqs, device=node.device)
    times = {}
    for count in (1, num_tokens + 1):  # the difference leaves the prompt out
        for _ in range(2):
            wait(node.device)
            started = time.perf_counter()
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            wait(node.device)
            times[count] = time.perf_counter() - started
    return (times[num_tokens + 1] - times[1]) / num_tokens


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines of the report, as they are measured."""
    config = ModelConfig(
        id=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        attention=arguments.attention,
        deterministic=arguments.deterministic,
        kernels="torch" if arguments.device == "cpu" else "auto",
    )
    node = Node(config, num_seqs=max(arguments.batches), context=arguments.context)
    machine = describe_machine()
    is_gpu = device_type(node.device) == "cuda"
    name = torch.cuda.get_device_name(node.device) if is_gpu else machine.processor
    bandwidth = bytes_per_second(node.device)
    yield f"# {node.loaded.info.name} on {name}\n"
    versions = ", ".join(f"{package} {version_of(package)}" for package in PACKAGES)
    yield f"- commit {machine.commit or 'unknown'}, Python {platform.python_version()}, {versions}"
    capability = torch.cuda.get_device_capability(node.device) if is_gpu else "none"
    yield f"- CUDA {torch.version.cuda}, capability {capability}"
    yield f"- attention {node.runner.attention_name}, blocks of {node.block_size}, numerics {node.loaded.info.numerics}"
    yield f"- {node.context} tokens of context; a copy moves {bandwidth / 1e9:.0f} GB/s\n"
    yield "| sequences | rows of each | step, ms | floor, ms | times the floor | times a plain step | busy |"
    yield "|---|---|---|---|---|---|---|"
    plain: dict[int, float] = {}
    for num_rows in (1, *VERIFIED_ROWS):
        for num_seqs in arguments.batches:
            shape = Shape(num_seqs, num_rows)
            seconds = node.seconds(shape, arguments.repeats)
            plain.setdefault(num_seqs, seconds)
            floor = node.floor_bytes(shape) / bandwidth
            busy = node.busy(shape)
            yield (
                f"| {num_seqs} | {num_rows} | {1e3 * seconds:.2f} | {1e3 * floor:.2f} | {seconds / floor:.2f} | "
                f"{seconds / plain[num_seqs]:.2f} | {'unknown' if busy is None else f'{busy:.0%}'} |"
            )
    yield "\n| sequences | transformers' generate, ms a token | Outrider, ms a step | times as fast |"
    yield "|---|---|---|---|"
    for num_seqs in arguments.batches:
        own = generate_seconds(node, num_seqs, arguments.generate_tokens)
        yield f"| {num_seqs} | {1e3 * own:.2f} | {1e3 * plain[num_seqs]:.2f} | {own / plain[num_seqs]:.2f} |"
    if arguments.draft:
        del node
        if is_gpu:
            torch.cuda.empty_cache()
        yield f"\n```\n{three_lines(config, arguments.draft)}\n```"


def three_lines(config: ModelConfig, draft: str) -> str:
    """As `python -m benchmarks.three_lines`, at temperatures 0 and 1."""
    pair = ModelPair.open(
        config, draft, kv_cache=KVCacheConfig(num_blocks=LINES_BLOCKS), prompts_file=DEFAULT_PROMPTS, draft_cpus=()
    )
    comparison = Comparison(pair=pair, num_rounds=LINES_ROUNDS)
    return as_text(comparison, asyncio.run(compare_lines(comparison)))


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelConfig().id, help="a Hugging Face id or a directory")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--deterministic", action="store_true", help="with model.deterministic")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--generate-tokens", type=int, default=64)
    parser.add_argument("--draft", help="drafter of the three lines: ngram, suffix or draft_model:ID; default: none")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"))
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tries the script")
    torch.manual_seed(0)
    lines = []
    for line in report(arguments):
        print(line, flush=True)
        lines.append(line)
    arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
