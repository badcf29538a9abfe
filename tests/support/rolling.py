"""Drafters with rollouts on a CPU. Triton's interpreter computes, and a replayed graph repeats the captured call."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from outrider.engine import step_graphs
from outrider.engine.gpu_kernels import filters, race
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.engine.rollouts import Rollouts
from outrider.engine.sampler import Sampler
from outrider.engine.sampler.array_decider import ArrayDecider
from outrider.engine.sampler.edits import LogitEditor, apply_by_kernel, apply_to_array
from outrider.engine.sampler.triton_decider import TritonDecider
from outrider.heads import module_steps as head_steps
from outrider.model_hub.loaded_model import LoadedModel
from outrider.speculation.proposers import head_forward
from outrider.speculation.proposers.draft_forward import open_rollouts
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.proposers.model_forward import ModelForward
from tests.support.interpreted_triton import interpreted_attention
from tests.support.toy_head import VOCAB_SIZE, ToyHead

BLOCK_SIZE = 16


class Graphs:
    """Graphs that run the captured call again when they are replayed. Captures and replays are counted."""

    def __init__(self) -> None:
        self.num_captured = self.num_replays = 0

    def capture(self, run):
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def decide_by_kernels(sampler: Sampler) -> Sampler:
    """Makes the sampler decide by kernels, as on a GPU."""
    editor = LogitEditor(sampler._editor.vocabulary, apply_by_kernel)
    sampler._editor, sampler.decider = editor, TritonDecider(editor)
    return sampler


def decide_by_arrays(sampler: Sampler) -> Sampler:
    """Makes the sampler decide by torch, which gives the same ids and is faster."""
    editor = LogitEditor(sampler._editor.vocabulary, apply_to_array)
    sampler._editor, sampler.decider = editor, ArrayDecider(editor)
    return sampler


def model_forward(model: LoadedModel, *, num_blocks: int = 64) -> ModelForward:
    """Returns a model's forward, set up as on a GPU. Torch computes the model."""
    cache = PagedKVCache(
        model.spec.planes,
        layer_groups=model.spec.layer_groups,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_scratch_blocks=1,
    )
    attention = interpreted_attention(num_heads=model.spec.num_heads, num_kv_heads=model.spec.num_kv_heads)
    runner = make_runner(model, cache, attention)
    runner._graphs = SimpleNamespace(run=lambda _batch: None)  # no batch runs as a graph
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"", enable_prefix_cache=True)
    sampler, spec = decide_by_kernels(model.open_sampler()), model.spec
    return ModelForward(pool, cache, runner, sampler, spec.max_model_len, spec.vocab_size)


def toy_head_forward(head: ToyHead, monkeypatch, *, num_cached_tokens: int = 1024) -> HeadForward:
    """Returns a head's forward, set up as on a GPU."""

    def cache_of(planes, **options):
        return PagedKVCache(planes, **options | {"num_scratch_blocks": 1})

    with monkeypatch.context() as patch:
        patch.setattr(head_forward, "PagedKVCache", cache_of)
        forward = HeadForward.of(
            head, num_cached_tokens=num_cached_tokens, known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool)
        )
    decide_by_kernels(forward.sampler)
    spec = head.spec
    forward.steps._attention = interpreted_attention(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads)
    forward.steps._as_logits_are = lambda values: values  # tensors
    return forward


def with_rollouts(forward: ModelForward | HeadForward, graphs: Graphs, monkeypatch):
    """Adds rollouts to the forward. `graphs` captures the rollouts, and also the steps of a head."""
    for module in (step_graphs, head_steps):
        monkeypatch.setattr(module, "cuda_graphs", lambda _device: graphs.capture)
    if isinstance(forward, HeadForward):
        forward.steps.capture_graphs()
    return replace(forward, rollouts=open_rollouts(forward, "cuda"))


def small(monkeypatch) -> None:
    """Limits graphs, their rows and the size of programs, since the interpreter is slow."""
    monkeypatch.setattr(Rollouts, "max_sequences", 4)
    monkeypatch.setattr(filters, "CHUNK", 512)
    monkeypatch.setattr(race, "BLOCKS_PER_PROGRAM", 4)
