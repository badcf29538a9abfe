"""A tiny random drafter head, features for it, and its drafts computed without a cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.features import FeatureReduction
from outrider.engine.sampler import Sampler, SampleRows
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.spec import HeadSpec
from tests.heads.golden_files import DenseAttention

VOCAB_SIZE = 300
WIDTH = 32


class ToyHead(HeadModel):
    """A head with at most one attention layer. Its logits depend on tokens, features, depths and positions."""

    def __init__(self, *, num_layers: int = 1, has_own_vocabulary: bool = False, **spec: object) -> None:
        random = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random) / shape[-1] ** 0.5

        self.spec = replace(
            HeadSpec(
                form="toy",
                name="tiny",
                fingerprint="f",
                num_layers=num_layers,
                num_heads=2,
                num_kv_heads=1,
                head_dim=16,
                width=WIDTH,
                vocab_size=VOCAB_SIZE,
                max_model_len=2048,
                dtype="float32",
            ),
            **spec,
        )
        self.reduction = FeatureReduction(taps=(1,), hidden_size=WIDTH)
        self.target_ids = torch.arange(3, VOCAB_SIZE, 4) if has_own_vocabulary else None
        self._embedding = weight(VOCAB_SIZE, WIDTH) * 4
        self._depths = weight(64, WIDTH) * 4
        self._positions = weight(2048, WIDTH) * 2
        self._in, self._qkv, self._out = weight(WIDTH, 2 * WIDTH), weight(4 * 16, WIDTH), weight(WIDTH, WIDTH)
        self._output = weight(VOCAB_SIZE if self.target_ids is None else len(self.target_ids), WIDTH) * 4

    def load(self, files: HeadFiles) -> None:
        raise NotImplementedError

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        joined = torch.cat([self._embedding[rows.token_ids], rows.features], dim=1)
        hidden = torch.tanh(joined @ self._in.T) + self._positions[rows.positions]
        for layer in range(self.spec.num_layers):
            query, key, value = (hidden @ self._qkv.T).view(-1, 4, 16).split((2, 1, 1), dim=1)
            hidden = hidden + attend(layer, query, key, value, 0.25).flatten(1) @ self._out.T
        return hidden

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return (hidden + self._depths[depths]) @ self._output.T


class ToyFeatures:
    """Features of one text, each of which depends on all tokens up to its own."""

    def __init__(self, token_ids, *, num_known: int | None = None) -> None:
        table = torch.randn((VOCAB_SIZE, WIDTH), generator=torch.Generator().manual_seed(4))
        self._values = torch.tanh(table[list(token_ids)].cumsum(0))
        self._num_known = len(token_ids) - 1 if num_known is None else num_known

    def __len__(self) -> int:
        return self._num_known

    def read(self, start: int, end: int) -> Tensor:
        assert 0 <= start < end <= len(self)
        return self._values[start:end]


def drafted(head: ToyHead, token_ids, params, num_tokens: int, *, prompt_length: int, num_true: int = 0) -> list[int]:
    """Returns the head's drafts after this text, computed without a cache.

    The tokens from `num_true` on are fed with the head's own states, as if they were not committed. If it is 0, all
    tokens count as committed.
    """
    sampler = Sampler(vocab_size=VOCAB_SIZE, known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool))
    text = list(token_ids)
    num_true = num_true or len(text)
    features = ToyFeatures(text[:num_true]).read(0, num_true - 1)
    for end in range(num_true, len(token_ids) + num_tokens):
        depths = torch.tensor([max(0, token - num_true + 1) for token in range(1, end)])
        rows = HeadRows(torch.tensor(text[1:end]), features, depths, torch.arange(end - 1))
        hidden = head.forward(rows, DenseAttention())[-1:]
        features = torch.cat([features, hidden])
        if end < len(token_ids):
            continue
        logits = torch.full((1, VOCAB_SIZE), -torch.inf)
        ids = torch.arange(VOCAB_SIZE) if head.target_ids is None else head.target_ids
        logits[:, ids] = head.logits(hidden, depths[-1:])
        state = sampler.start(
            params, sample=0, prompt_token_ids=text[:prompt_length], generated_token_ids=text[prompt_length:]
        )
        text += sampler.sample(logits, [SampleRows(state, end, ())]).token_ids
    return text[len(token_ids) :]
