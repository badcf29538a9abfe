"""A proposer that needs features as a head does, and features that identify their token and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.node import FeatureFormat
from outrider.speculation.proposers.base import Proposal, ProposalRequest, nothing
from tests.support.scripted_proposer import ScriptedProposer

FEATURES = FeatureFormat(fingerprint="fe" * 32, width=4, dtype="float32", taps=(1, 2))


def features_of(token_ids: Sequence[int]) -> torch.Tensor:
    """Returns features [num_tokens, 4]: id, position, and two numbers that depend on all earlier tokens."""
    ids = torch.tensor(token_ids, dtype=torch.float64)
    places = torch.arange(len(ids), dtype=torch.float64)
    behind = torch.cumsum(ids * (places + 1.0), 0)
    return torch.stack([ids, places, behind % 1009.0, torch.sin(behind)], dim=1).to(torch.float32)


def feature_bytes(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """Returns the features of tokens [start, end) of this text as bytes."""
    return features_of(token_ids)[start:end].numpy().tobytes()


class FakeHead(ScriptedProposer):
    """Drafts if it has the features of all tokens but the newest, and records wrong features."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts)
        self.info = replace(self.info, name="fake_head", features=FEATURES)
        self.wrong: list[ProposalRequest] = []

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        for request in requests:
            assert request.features is not None
            num_tokens = len(request.features)
            expected = features_of(request.token_ids)[:num_tokens]
            if not np.array_equal(request.features.read(0, num_tokens), expected):
                self.wrong.append(request)
        return [
            proposal if len(request.features or ()) == len(request.token_ids) - 1 else nothing(request)
            for request, proposal in zip(requests, super().propose(requests), strict=True)
        ]
