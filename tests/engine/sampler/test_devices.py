"""The sampler over logits on a GPU, as torch's FakeTensorMode runs it without one: there are devices but no values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from outrider.engine import transfer
from outrider.engine.sampler import Sampler
from outrider.engine.sampler.decider import Vocabulary
from outrider.engine.sampler.edits import LogitEditor
from outrider.engine.sampler.logprobs import pending_logprobs
from outrider.engine.sampler.sequence_sampling import SampleRows
from outrider.engine.sampler.torch_decider import TorchDecider
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams
from tests.fake_gpu import GPU, OneDevice, fake_gpu

VOCAB_SIZE = 5000

SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9, "logit_bias": ((3, 1.0),)},
]


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs a function among fake tensors, which allow no question about a value."""

    def run(function):
        with fake_gpu(monkeypatch), OneDevice():
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


def test_there_is_one_round_which_does_not_wait(known, on_gpu):
    vocabulary, decisions = Vocabulary.of(known), decisions_of(known)

    def decide(logits):
        decider = TorchDecider(LogitEditor(vocabulary, GPU), in_one_round=True)
        for each in decider.first_rounds(logits, decisions):
            (token_ids, verdicts), _ = each.run()
            assert (token_ids.shape, token_ids.device.type) == ((len(each.rows),), "cuda")
            assert verdicts is None

    on_gpu(decide)


@pytest.mark.parametrize("mode", LogprobsMode)
def test_logprobs_are_read_in_one_transfer(known, on_gpu, mode, monkeypatch):
    vocabulary = Vocabulary.of(known)
    decisions = decisions_of(known, logprobs=LogprobsRequest(num_top=3, mode=mode))
    read = []
    table = np.tile([3.0, 0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0], (len(decisions), 1))
    monkeypatch.setattr(transfer, "download", lambda numbers: read.append(numbers) or table.view(np.int64).reshape(-1))

    def ask(logits):
        token_ids = torch.full((len(decisions),), 3, device=GPU)
        return transfer.read(pending_logprobs(logits, decisions, token_ids, LogitEditor(vocabulary, GPU)))[0]

    answers = on_gpu(ask)
    assert [(numbers.device.type, tuple(numbers.shape)) for numbers in read] == [("cuda", (table.size,))]
    assert [(each.token_id, [token_id for token_id, _ in each.top]) for each in answers] == [(3, [2, 3, 4])] * 16


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (lambda logits: logits.amax().item(), DataDependentOutputException),
        (lambda logits: logits.cpu(), AssertionError),
        (lambda logits: logits + torch.ones(()), AssertionError),
        (lambda logits: torch.ones(3).to(logits.device), AssertionError),
        (lambda logits: torch.ones(3).to(logits.device, non_blocking=True), AssertionError),
    ],
)
def test_a_wait_or_a_mix_is_noticed(on_gpu, question, error):
    """Negative control."""
    with pytest.raises(error):
        on_gpu(question)
