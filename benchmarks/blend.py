"""Measures blended prompts: the time to the first token, and how far answers are from those of full computation.

    .venv/bin/python benchmarks/blend.py [--rounds 15] [--prompts 36] [--shares 0,0.05,0.15,0.3,1]

First token: 4 pieces of 500 tokens and a question, from a local cluster of the default model. Blended prompts, whose
pieces are cached, take turns with prompts of which nothing is cached, in an order that changes from round to round.

Quality: each prompt has 4 texts of the default prompts and a question about one of them. Full computation generates 16
tokens at temperature 0, which are then given to the model after the blended prompt. KL is the mean divergence of the
distributions of these tokens from full computation's; `same` is the share of tokens that are likeliest in both.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.bench.machine import describe_machine
from outrider.bench.prompts import DEFAULT_PROMPTS, load_prompts
from outrider.client import Client, GenerateOptions
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.engine.cpu_turns import CpuTurns
from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_progress import StepProgress
from outrider.model_hub.compute import open_model_runtime
from outrider.model_hub.config import ModelConfig
from outrider.prefill import PrefillCall
from outrider.request import Blend, RequestOptions, SamplingParams
from prefill_node.blending import Blending
from prefill_node.jobs import PrefillJob
from prefill_node.task import PrefillTask, chunk_rows
from prefill_node.turn import PrefillTurn

NUM_PIECES, PIECE_TOKENS, NUM_GENERATED = 4, 500, 16
LENGTHS = (PIECE_TOKENS,) * NUM_PIECES


class BlendedPrompts:
    """Computes prompts in this process as a prefill node does."""

    def __init__(self) -> None:
        runtime = open_model_runtime(ModelConfig(), KVCacheConfig(), on_rank_lost=print)
        pool = runtime.make_pool(KVCacheConfig())
        rows = runtime.max_rows_per_step
        self._scheduler = Scheduler(pool, max_running=16, max_rows_per_step=rows, reserve_blocks_per_running=0)
        self._engine = PromptEngine(pool, self._scheduler, runtime.kv_cache, runtime.runner)
        self._ids = itertools.count(1)
        self.tokenizer = Tokenizer.from_file(str(runtime.model.directory / "tokenizer.json"))

    def logits(self, tokens: Sequence[int], lengths: Sequence[int], share: float, num_last: int) -> np.ndarray:
        """Returns the logits of the last `num_last` tokens: [num_last, vocab_size] float32."""
        task = self._task(tokens, Blend(piece_lengths=tuple(lengths), recompute_share=share))
        progress = StepProgress()
        turn = PrefillTurn(CpuTurns(), self._engine.clock, progress, num_layers=1)
        blending, sequence, found = Blending(self._engine, turn, progress), task.sequence, []
        sequence.num_cacheable = min(sequence.num_cacheable, len(tokens) - num_last)
        if task.blend is None:
            self._scheduler.add(sequence)
        else:
            blending.start(task)
        while sequence.kv is None or sequence.num_uncomputed:
            while blending.has_work:
                blending.work()
            plan = blending.take(self._scheduler.plan())
            for item in plan.scheduled:
                own = task if item.sequence is sequence else None
                rows = list(chunk_rows(item, own))
                if own is not None:
                    rows = [with_logits(each, len(tokens) - num_last) for each in rows]
                if rows:
                    found.append(np.array(self._engine.forward(plan.block_copies, rows)))
                kv = item.sequence.kv
                assert kv is not None
                kv.advance(kv.num_tokens + item.num_rows)
                kv.publish(item.sequence.token_ids if own is None else own.publishable_token_ids)
                blending.note_computed(item)
        self._scheduler.remove(sequence)
        return np.concatenate(found)[-num_last:]

    def _task(self, tokens: Sequence[int], blend: Blend) -> PrefillTask:
        options = RequestOptions(
            sampling=SamplingParams(seed=0, max_tokens=1), blend=blend if blend.piece_lengths else None
        )
        call = PrefillCall(
            sequence_group_id=bytes(16),
            transfer_id=bytes(16),
            request_id="",
            token_ids=tuple(tokens),
            kv_address="",
            decode_incarnation=bytes(16),
            held_prefix_length=0,
            fingerprint="",
            options=options,
        )
        return PrefillTask.of(PrefillJob(next(self._ids), call), None, self._engine.pool.block_size)


def with_logits(rows: SequenceRows, first: int) -> SequenceRows:
    """Returns rows whose tokens from position `first` on have logits."""
    end = rows.start_position + len(rows.token_ids)
    return rows._replace(num_logits=max(end - max(first, rows.start_position), 0))


def texts() -> list[str]:
    contents: list[Any] = [prompt.content for prompt in load_prompts(DEFAULT_PROMPTS)]
    return [content if isinstance(content, str) else content[0].content for content in contents]


def measure_quality(num_prompts: int, shares: Sequence[float]) -> None:
    model, rng, known = BlendedPrompts(), random.Random(0), texts()  # noqa: S311

    def encode(text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False).ids)

    results: dict[float, list[tuple[float, float, bool]]] = {share: [] for share in shares}
    for _ in range(num_prompts):
        chosen = rng.sample(known, NUM_PIECES)
        asked = " ".join(rng.choice(chosen).split()[:8])
        pieces = [encode(f"<|im_start|>user\nHere are four texts.\n\n{chosen[0]}\n\n")]
        pieces += [encode(f"{text}\n\n") for text in chosen[1:]]
        rest = encode(
            f'Summarise the text that begins with "{asked}" in two sentences.<|im_end|>\n<|im_start|>assistant\n'
        )
        tokens = [*itertools.chain(*pieces), *rest]
        for _ in range(NUM_GENERATED):
            tokens.append(int(model.logits(tokens, (), 0.0, 1)[0].argmax()))
        given, lengths = tokens[:-1], [len(piece) for piece in pieces]
        full = log_softmax(model.logits(given, (), 0.0, NUM_GENERATED))
        for share in shares:
            found = log_softmax(model.logits(given, lengths, share, NUM_GENERATED))
            divergence = (np.exp(full) * (full - found)).sum(axis=1)
            same = full.argmax(axis=1) == found.argmax(axis=1)
            results[share].append((float(divergence.mean()), float(same.mean()), bool(same[0])))
    print(f"\n{num_prompts} prompts of 4 texts, {NUM_GENERATED} tokens each\n")
    print("| share | KL, mean | KL, median | same | first token the same |\n| -- | -- | -- | -- | -- |")
    for share, rows in results.items():
        kl, same, first = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        print(
            f"| {share:g} | {kl.mean():.4f} | {np.median(kl):.4f} | {same.mean():.3f} | {first.mean():.3f} |",
            flush=True,
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    normalised: np.ndarray = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return normalised


def measure_first_token(num_rounds: int) -> None:
    rng = random.Random(1)  # noqa: S311

    def some_tokens(number: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(number)]

    times: dict[str, list[float]] = {"everything computed": [], "blended": []}
    with Cluster(ClusterConfig(port=0)) as cluster, Client(cluster.router_address) as client:
        cluster.wait_serving(120.0)
        cached = [some_tokens(PIECE_TOKENS) for _ in range(8)]
        for piece in cached:
            client.complete(piece, max_tokens=1)
        for number in range(num_rounds + 1):
            for name in sorted(times, reverse=number % 2 == 0):
                is_blended = name == "blended"
                pieces = rng.sample(cached, NUM_PIECES) if is_blended else [some_tokens(PIECE_TOKENS) for _ in LENGTHS]
                prompt = [*itertools.chain(*pieces), *some_tokens(30)]
                options: GenerateOptions = {"max_tokens": 1, "temperature": 0.0}
                if is_blended:
                    options["blend_piece_lengths"] = LENGTHS
                started = time.perf_counter()
                answer = client.complete(prompt, **options)
                seconds = time.perf_counter() - started
                assert (answer.summary.usage.num_blended_tokens > 0) == is_blended
                if number:  # the first round warms up
                    times[name].append(seconds)
    print(f"\nfirst token of {NUM_PIECES} pieces of {PIECE_TOKENS} tokens, {num_rounds} rounds, medians\n")
    for name, found in times.items():
        print(f"{name}: {1e3 * median(found):.0f} ms ({1e3 * min(found):.0f} to {1e3 * max(found):.0f})")
    ratios = [blended / full for full, blended in zip(*times.values(), strict=True)]
    print(f"ratio: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of first tokens; 0: do not measure them")
    parser.add_argument("--prompts", type=int, default=36, help="for quality; 0: do not measure it")
    parser.add_argument("--shares", default="0,0.05,0.15,0.3,1")
    arguments = parser.parse_args()
    print(describe_machine())
    if arguments.rounds:
        measure_first_token(arguments.rounds)
    if arguments.prompts:
        measure_quality(arguments.prompts, [float(share) for share in arguments.shares.split(",")])


if __name__ == "__main__":
    main()
