"""`HeadForward` gives the same logits as the heads' own published code, for every form."""

from __future__ import annotations

import pytest
import torch

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.draft_forward import DraftForward, PathRows
from outrider.speculation.proposers.head_forward import HeadForward
from tests.heads import golden_files
from tests.heads.golden_heads import assert_logits, opened, taps_of


class Values:
    """Features given as an array."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def read(self, start, end):
        return self.values[start:end]


@pytest.fixture(params=golden_files.NAMES)
def golden(request, tmp_path):
    return golden_files.unpack(request.param, tmp_path)


@pytest.mark.parametrize("num_known_before", [0, 3])
def test_logits_are_the_owners(golden, num_known_before, monkeypatch):
    head, seen, sure, decide = opened(golden), [], [], DraftForward._decide

    def noting(self, logits, rows, **options):
        seen.append(torch.tensor(logits))
        sure.append(torch.tensor(options["confidences"]))
        return decide(self, logits, rows, **options)

    monkeypatch.setattr(DraftForward, "_decide", noting)
    device = torch.device("cpu")
    known = torch.ones(head.spec.vocab_size, dtype=torch.bool)
    forward = HeadForward.of(head, num_cached_tokens=256, known_token_ids=known, device=str(device))
    token_ids, features = golden.token_ids.tolist(), head.reduction.to(device, torch.float32)(taps_of(golden, head))
    num_true = len(features)
    options = RequestOptions(sampling=SamplingParams(seed=1, max_tokens=9, temperature=0.0))
    sampling = forward.start(SequenceStart(options=options, sample=0, prompt_length=1), token_ids[:1])
    blocks = forward.pool.allocate(forward.pool.num_blocks_for(len(token_ids) + 16))

    def fed(start, end, *, states=(), num_decisions=1):
        rows = PathRows(
            token_ids[start:end],
            start,
            blocks,
            sampling,
            (),
            num_decisions,
            False,
            Values(features),
            num_true + 1,
            states,
        )
        (decided,) = forward.decide([rows], ())
        return decided.state

    if num_known_before:
        fed(1, 1 + num_known_before, num_decisions=0)
    state = fed(1 + num_known_before, num_true + 1)
    if head.spec.num_parallel == 1:
        for place in range(num_true + 1, len(token_ids)):
            state = fed(place, place + 1, states=(state,))
    found = torch.cat(seen)
    assert_logits(found if head.target_ids is None else found[:, head.target_ids], golden.logits)
    estimated = golden.logits.softmax(-1).amax(-1) if golden.confidences is None else golden.confidences.sigmoid()
    assert_logits(torch.cat(sure).float(), estimated)
