# ruff: noqa: F811 - fixtures
"""A rollout on a GPU, as far as a machine without one can tell: where the host waits, and what is captured."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.engine import module_steps, step_graphs
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.engine.sampler import Sampler
from outrider.heads import module_steps as head_steps
from outrider.request import SamplingParams
from outrider.speculation.features import HeadRules
from outrider.speculation.proposers import draft_forward
from outrider.speculation.proposers.draft_forward import PathRows, open_rollouts
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.proposers.model_forward import ModelForward
from tests.engine.test_gpu_step import BATCH, backend, gpu, node, reads, sampler  # noqa: F401
from tests.support import fake_gpu
from tests.support.fake_gpu import GPU, OneDevice, Operations
from tests.support.toy_head import VOCAB_SIZE as HEAD_VOCAB_SIZE
from tests.support.toy_head import WIDTH, ToyHead

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton, pytest.mark.parametrize("backend", ["triton"], indirect=True)]
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def _kernels(backend, monkeypatch):
    for module in (step_graphs, module_steps, head_steps):
        monkeypatch.setattr(module, "cuda_graphs", lambda _device: capture)
    # What is captured is compiled before the first request, whatever its alignment.
    monkeypatch.setattr(fake_gpu, "are_aligned", lambda _tensors: True)


def capture(run):
    run()
    return lambda: None


def model_forward(node):
    cache = PagedKVCache(
        node.loaded.spec.planes,
        layer_groups=node.loaded.spec.layer_groups,
        num_blocks=24,
        block_size=BLOCK_SIZE,
        device=str(GPU),
        num_scratch_blocks=1,
    )
    runner = make_runner(node.loaded, cache, node.attention, graphs=GraphShapes(4))
    pool = SimpleNamespace(block_size=BLOCK_SIZE)
    return ModelForward(pool, cache, runner, node.sampler, 256, node.loaded.spec.vocab_size)


def head_forward(node):
    head = ToyHead(has_own_vocabulary=True)
    for name, value in vars(head).items():
        if isinstance(value, torch.Tensor):
            setattr(head, name, value.to(GPU))
    cache = PagedKVCache(head.spec.planes, num_blocks=24, block_size=BLOCK_SIZE, device=str(GPU), num_scratch_blocks=1)
    steps = head_steps.ModuleHeadSteps(head, cache, device=str(GPU), kernels=None)
    with OneDevice():
        steps.capture_graphs()
    pool = SimpleNamespace(block_size=BLOCK_SIZE)
    return HeadForward(pool, cache, head, steps, node.head_sampler, 256, HEAD_VOCAB_SIZE, HeadRules())


@pytest.fixture
def head_sampler(backend):
    known = torch.ones(HEAD_VOCAB_SIZE, dtype=torch.bool)
    return Sampler(vocab_size=HEAD_VOCAB_SIZE, known_token_ids=known, device=GPU)


@pytest.fixture(params=["model", "head"])
def forward(request, head_sampler, node):
    if request.param == "model":
        return model_forward(node)
    node.head_sampler = head_sampler
    return head_forward(node)


class Features:
    def read(self, start, end):
        return torch.zeros((end - start, WIDTH), device=GPU)


def paths_of(forward, *numbers):
    """Returns one path for each (number of rows, number of tokens)."""
    state = forward.sampler.start(SamplingParams(seed=1, max_tokens=99, top_p=0.9), sample=0, prompt_token_ids=[1, 2])
    fed, blocks = Features(), (range(8), range(8, 16), range(16, 24))
    return [
        PathRows([5] * rows, 20, blocks[place], state, (), 1 + place, False, fed, 20 + rows, (), tokens)
        for place, (rows, tokens) in enumerate(numbers)
    ]


def test_a_rollout_is_one_graph_of_the_rehearsed_forwards_and_the_host_reads_once(forward, reads, monkeypatch):
    """This is one test since capturing takes seconds. The rehearsal reserves memory for the same number of forwards."""
    captured = record_captured_forwards(monkeypatch)
    with OneDevice():
        rolling = replace(forward, rollouts=open_rollouts(forward, str(GPU)))
    assert len(captured) == GraphShapes(has_rollouts=True).num_forwards - GraphShapes().num_forwards == 132
    assert reads == [], "capturing does not wait"

    with OneDevice():  # some rows are a prompt's, and one path wants only one token
        decided = rolling.decide(paths_of(rolling, (40, 5), (3, 1), (2, 4)), [(0, 23)])
    rounds, confidences = 3 + 2 + 1, 3 if rolling.head is not None else 0
    assert reads == [rounds + confidences + 4 * (4 + 1) * 2]
    assert [1 + len(each.following) for each in decided] == [5, 1, 4]
    assert [len(each.token_ids) for each in decided] == [1, 2, 3]
    if rolling.head is not None:
        assert {tuple(each.state.shape) for each in (decided[0], *decided[0].following)} == {(WIDTH,)}

    rows = paths_of(rolling, (1, 5), (3, 2))
    winners = torch.zeros(2, dtype=torch.int64, device=GPU)
    states = None if rolling.head is None else torch.zeros((2, WIDTH), device=GPU)
    with OneDevice(), Operations() as operations:
        rolling._roll_out(rolling.rollouts, rows, winners, states)
    of_head = {"aten.clone.default"}
    views = {f"aten.{name}" for name in ("slice.Tensor", "select.int", "unbind.int", "narrow.default", "view.dtype")}
    copies = {"aten.copy_.default", "aten._to_copy.default", "aten.index_select.default"}
    assert operations.names - views <= copies | (of_head if rolling.head else set())


def record_captured_forwards(monkeypatch):
    """Returns a list that gets the arguments of each forward that is captured."""
    from outrider.engine import rollouts  # imports triton

    captured, make = [], rollouts.Rollouts.__init__

    def recording(self, rolling, *others, **options):
        def recorded(*arguments):
            captured.append(arguments)
            return rolling.forward(*arguments)

        make(self, rolling._replace(forward=recorded), *others, **options)

    monkeypatch.setattr(rollouts.Rollouts, "__init__", recording)
    return captured


def test_a_step_of_a_head_is_a_replay(head_sampler, node):
    node.head_sampler = head_sampler
    forward = head_forward(node)
    with OneDevice(), Operations() as operations:
        batch = build_input_batch([SequenceRows([5, 6], 7, range(8), 1)], BLOCK_SIZE)
        hidden, logits = forward.steps.forward(batch, torch.zeros((2, WIDTH), device=GPU), [0, 0], batch)
    assert not {name for name in operations.names if "mm" in name or "embedding" in name or "index" in name}
    assert (hidden.shape, logits.shape) == ((1, WIDTH), (1, HEAD_VOCAB_SIZE))


def test_what_cannot_be_captured_is_told_once_and_drafts_token_by_token(forward, monkeypatch, caplog):
    def failing(_run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graphs, "cuda_graphs", lambda _device: failing)
    with caplog.at_level(logging.WARNING, draft_forward.__name__):
        assert open_rollouts(forward, str(GPU)) is None
    (record,) = caplog.records
    assert "operation not permitted" in record.getMessage()
    assert forward.max_tokens == 1
