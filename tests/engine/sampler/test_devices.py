"""The sampler over logits on a GPU, as torch's FakeTensorMode runs it without one: there are devices but no values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.sampler import Sampler, logprobs
from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.sequence_sampling import SampleRows
from outrider.engine.sampler.torch_decider import TorchDecider
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams

VOCAB_SIZE = 5000
GPU = torch.device("cuda:0")

SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9, "logit_bias": ((3, 1.0),)},
]


class OneDevice(TorchDispatchMode):
    """Refuses what makes the host wait for the GPU, and operations of mixed devices, which torch allows for numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before, after = devices_of((args, kwargs)), devices_of(result)
        assert not (before == {"cuda"} and after == {"cpu"}), f"{function} reads from the GPU"
        assert len(before) <= 1, f"{function} mixes devices"
        return result


def devices_of(tensors):
    return {each.device.type for each in tree_leaves(tensors) if isinstance(each, torch.Tensor)}


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs a function among fake tensors, which allow no question about a value."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # FakeTensorMode has none

    def run(function):
        with FakeTensorMode(), OneDevice():
            return function(torch.empty(4 * len(SETTINGS), VOCAB_SIZE, device=GPU))

    return run


@pytest.fixture(scope="module")
def known():
    mask = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    mask[[7, 4998, 4999]] = False
    return mask


def decisions_of(known, **options):
    """Four rows for a sample of each of the settings."""
    sampler = Sampler(vocab_size=VOCAB_SIZE, known_token_ids=known)
    states = [
        sampler.start(
            SamplingParams(seed=i, max_tokens=99, **settings),
            sample=0,
            prompt_token_ids=[1, 2],
            stop_token_ids=[5],
            **options,
        )
        for i, settings in enumerate(SETTINGS)
    ]
    return [decision for state in states for decision in SampleRows(state, 9, (1, 2, 3)).decisions()]


def test_no_round_leaves_the_gpu_or_waits_for_it(known, on_gpu):
    vocabulary, decisions = Vocabulary.of(known), decisions_of(known)

    def decide(logits):
        decider = TorchDecider(LogitEditor(vocabulary, GPU))
        for each in decider.first_rounds(logits, decisions):
            outcome, after = each.run()
            assert outcome.shape == (2, len(each.rows))
            assert outcome.device.type == "cuda"
            if decisions[each.rows[0]].params.is_greedy:
                continue
            for verdict in (1, 2, 3, 4, 7):
                later, _ = after.again([verdict] * len(each.rows)).run()
                assert later.device.type == "cuda"

    on_gpu(decide)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_logprobs_are_read_in_one_transfer(known, on_gpu, mode, monkeypatch):
    vocabulary = Vocabulary.of(known)
    decisions = decisions_of(known, logprobs=LogprobsRequest(num_top=3, mode=mode))
    read = []
    monkeypatch.setattr(
        logprobs, "download", lambda rows: read.append(rows) or [[0.0, 1.0, 1.0, 1, 2, 3, 4, 0.0, 0.0, 0.0]] * len(rows)
    )

    def ask(logits):
        logprobs.logprobs_of(logits, decisions, [3] * len(decisions), LogitEditor(vocabulary, GPU))

    on_gpu(ask)
    assert [(rows.device.type, tuple(rows.shape)) for rows in read] == [("cuda", (len(decisions), 10))]


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (lambda logits: logits.amax().item(), DataDependentOutputException),
        (lambda logits: logits.cpu(), AssertionError),
        (lambda logits: logits + torch.ones(()), AssertionError),
    ],
)
def test_a_wait_or_a_mix_is_noticed(on_gpu, question, error):
    """Negative control."""
    with pytest.raises(error):
        on_gpu(question)
