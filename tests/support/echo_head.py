"""A target whose next token depends only on the newest one, and a head whose drafts are therefore always right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.features import FeatureReduction
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.spec import HeadSpec
from tests.support.tiny_model import make_tiny_model


def make_echo_model(folder: Path) -> Path:
    """Writes a tiny model whose layers add nothing to the embedding of the newest token."""
    make_tiny_model(folder)
    path = folder / "model.safetensors"
    added = ("o_proj.weight", "down_proj.weight")
    save_file(
        {name: torch.zeros_like(value) if name.endswith(added) else value for name, value in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    return folder


def make_echo_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"echo": True}))
    return folder


class EchoHead(HeadModel):
    """Computes the target's logits from the newest token alone, and records the features that it was fed."""

    form = "echo"

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        return "echo" in config

    def __init__(self, files: HeadFiles) -> None:
        self.reduction = FeatureReduction(taps=(2,), hidden_size=files.target.hidden_size)

    def load(self, files: HeadFiles) -> None:
        target = files.target
        self.embedding, self._norm, self._output = (
            each.float()
            for each in (target.embedding(), target.checkpoint.mapped("model.norm.weight"), target.output_layer())
        )
        self.fed: list[
            tuple[int, int, int]
        ] = []  # rows with true features: (position, the feature's token, the next token)
        EchoHead.opened.append(self)
        self.spec = HeadSpec(
            form="echo",
            name=files.folder.name,
            fingerprint="",
            num_layers=1,
            num_kv_heads=1,
            head_dim=16,
            width=target.hidden_size,
            vocab_size=target.vocab_size,
            max_model_len=2048,
            dtype="float32",
        )

    opened: list[EchoHead] = []  # noqa: RUF012 a test empties it
    is_confused = False  # whether it drafts the second best token instead of the best

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        one = torch.ones((len(rows.token_ids), 1, 16))
        attended = attend(0, one, one, one * (rows.positions + 1.0)[:, None, None], 1.0)[:, 0, 0]
        assert torch.allclose(attended, rows.positions / 2.0 + 1.0), "each row sees those before it, once each"
        for token_id, feature, depth, position in zip(*vars_of(rows), strict=True):
            if depth == 0 and feature.any():  # warm-up feeds zeros
                nearest = (self.embedding - feature).abs().amax(1)
                assert nearest.min() < 1e-5, "the target's hidden state, which is its embedding"
                self.fed.append((int(position), int(nearest.argmin()), int(token_id)))
        return self.embedding[rows.token_ids]

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
        logits = (hidden * scale * self._norm) @ self._output.T
        if self.is_confused:
            best = logits.topk(2).indices
            logits.scatter_(1, best, logits.gather(1, best.flip(1)))
        return logits


def vars_of(rows: HeadRows) -> tuple[Tensor, ...]:
    return rows.token_ids, rows.features, rows.depths, rows.positions
