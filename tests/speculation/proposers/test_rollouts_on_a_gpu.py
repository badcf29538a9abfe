# ruff: noqa: F811 - fixtures
"""A rollout on a GPU, as far as a machine without one can tell: where the host waits, and what is captured."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.engine.sampler import Sampler
from outrider.request import SamplingParams
from outrider.speculation.features import HeadRules
from outrider.speculation.proposers import draft_forward
from outrider.speculation.proposers.draft_forward import PathRows, with_rollouts
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.proposers.model_forward import ModelForward
from tests.engine.test_gpu_step import BATCH, Kernel, Operations, backend, gpu, node, reads, sampler  # noqa: F401
from tests.support.fake_gpu import GPU, OneDevice
from tests.support.toy_head import VOCAB_SIZE as HEAD_VOCAB_SIZE
from tests.support.toy_head import WIDTH, ToyHead

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.parametrize("backend", ["triton"], indirect=True)]
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def _kernels(backend, monkeypatch):
    from outrider.engine import rollouts, step_graphs

    monkeypatch.setattr(rollouts, "advance", Kernel("advance"))
    monkeypatch.setattr(step_graphs, "cuda_graphs", lambda _device: capture)


def capture(run):
    run()
    return lambda: None


def model_forward(node, monkeypatch):
    from outrider.engine import module_steps

    monkeypatch.setattr(module_steps, "cuda_graphs", lambda _device: capture)
    cache = PagedKVCache(
        node.loaded.spec.planes, num_blocks=24, block_size=BLOCK_SIZE, device=str(GPU), num_scratch_blocks=1
    )
    runner = make_runner(node.loaded, cache, node.attention, graphs=GraphShapes(4))
    pool = SimpleNamespace(block_size=BLOCK_SIZE)
    return ModelForward(pool, cache, runner, node.sampler, 256, node.loaded.spec.vocab_size)


def head_forward(node):
    from outrider.heads.module_steps import ModuleHeadSteps

    head = ToyHead(has_own_vocabulary=True)
    for name, value in vars(head).items():
        if isinstance(value, torch.Tensor):
            setattr(head, name, value.to(GPU))
    cache = PagedKVCache(head.spec.planes, num_blocks=24, block_size=BLOCK_SIZE, device=str(GPU), num_scratch_blocks=1)
    steps = ModuleHeadSteps(head, cache, device=str(GPU), kernels=None)
    pool = SimpleNamespace(block_size=BLOCK_SIZE)
    return HeadForward(pool, cache, head, steps, node.head_sampler, 256, HEAD_VOCAB_SIZE, HeadRules())


@pytest.fixture
def head_sampler(backend):
    known = torch.ones(HEAD_VOCAB_SIZE, dtype=torch.bool)
    return Sampler(vocab_size=HEAD_VOCAB_SIZE, known_token_ids=known, device=GPU)


@pytest.fixture(params=["model", "head"])
def forward(request, head_sampler, node, monkeypatch):
    if request.param == "model":
        return model_forward(node, monkeypatch)
    node.head_sampler = head_sampler
    return head_forward(node)


class Features:
    def read(self, start, end):
        return torch.zeros((end - start, WIDTH), device=GPU)


def paths_of(forward, *numbers):
    """Of (rows, tokens) each."""
    state = forward.sampler.start(SamplingParams(seed=1, max_tokens=99, top_p=0.9), sample=0, prompt_token_ids=[1, 2])
    fed, blocks = Features(), (range(8), range(8, 16), range(16, 24))
    return [
        PathRows([5] * rows, 20, blocks[place], state, (), 1 + place, False, fed, 20 + rows, (), tokens)
        for place, (rows, tokens) in enumerate(numbers)
    ]


def test_neither_the_capture_nor_a_rollout_waits_and_the_host_reads_once(forward, reads):
    with OneDevice():
        rolling = forward.rolling_out(capture)
        assert reads == []
        decided = rolling.decide(paths_of(forward, (1, 5), (3, 2), (2, 4)), [(0, 23)])
    assert reads == [5 * (4 + 1) * 4]
    assert [1 + len(each.following) for each in decided] == [5, 2, 4]
    assert [len(each.token_ids) for each in decided] == [1, 2, 3]
    if forward.head is not None:
        assert {tuple(each.state.shape) for each in (decided[0], *decided[0].following)} == {(WIDTH,)}


def test_a_rollout_queues_copies_and_one_graph(forward):
    rolling = forward.rolling_out(capture)
    with OneDevice(), Operations() as operations:
        rolling._roll_out(rolling.rollouts, paths_of(forward, (1, 5), (3, 2)))
    of_head = {"aten.cat.out", "aten.clone.default", "aten.zeros.default"}
    views = {f"aten.{name}" for name in ("slice.Tensor", "select.int", "unbind.int", "narrow.default", "view.dtype")}
    assert operations.names - views <= {"aten.copy_.default", *(of_head if forward.head else ())}


def test_as_many_forwards_are_captured_as_a_rehearsal_counts(forward, monkeypatch):
    """It reserves memory for them."""
    from outrider.engine import rollouts  # imports triton

    captured, capture_all = [], rollouts.Rollouts.capture_all

    def counting(self, compute, *others):
        def counted(*arguments):
            captured.append(arguments)
            return compute(*arguments)

        capture_all(self, counted, *others)

    monkeypatch.setattr(rollouts.Rollouts, "capture_all", counting)
    forward.rolling_out(capture)
    assert len(captured) == rollouts.Rollouts.num_forwards == 168


def test_other_rows_have_a_forward_of_their_own_and_wait_beside(forward, reads):
    rolling = forward.rolling_out(capture)
    with OneDevice():
        decided = rolling.decide(paths_of(forward, (1, 1), (2, 3), (40, 4)), [])
    assert len(reads) == 2
    assert [len(each.following) for each in decided] == [0, 2, 0]


def test_what_cannot_be_captured_is_told_once_and_drafts_token_by_token(forward, monkeypatch, caplog):
    from outrider.engine import step_graphs

    def failing(_run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "cuda_graphs", lambda _device: failing)
    with caplog.at_level(logging.WARNING, draft_forward.__name__):
        assert with_rollouts(forward, str(GPU)) is forward
    (record,) = caplog.records
    assert "operation not permitted" in record.getMessage()
    assert forward.max_tokens == 1
    monkeypatch.setattr(step_graphs, "cuda_graphs", lambda _device: capture)
    assert with_rollouts(forward, str(GPU)).max_tokens > 1
    assert len(caplog.records) == 1
