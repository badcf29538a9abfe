"""MLPSpeculator: a small recurrent network over the target's last hidden state and the drafted tokens.

    state = GELU(norm_i(state_weight · proj_i(state) + emb_weight · emb_i(token)));  logits = head_i(state)

for the i-th token ahead; the first state is the target's last hidden state, rescaled where `scale_input` says so.
proj_0 only concerns the target's state, so it belongs to the reduction: a feature is as wide as the head's own state.

Source: Wertheimer et al. 2024, arXiv 2404.19124; names and formulas of fms-extras (fms_extras/models/speculator.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.layouts import check_options

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
EPSILON = 1e-6
_OPTIONS = ("scale_input", "tie_weights")


class _Stage(NamedTuple):
    """What gives the i-th token ahead. Stages may share tensors."""

    embedding: Tensor  # [vocab_size, inner_dim]
    projection: Tensor | None  # [inner_dim, inner_dim]; None for the first stage: the reduction has made it
    norm_weight: Tensor  # [inner_dim]
    norm_bias: Tensor  # [inner_dim]
    output: Tensor  # [vocab_size, inner_dim]


class MLPSpeculator(HeadModel):
    """The stages of one folder."""

    form = "mlp_speculator"

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == cls.form

    def __init__(self, files: HeadFiles) -> None:
        config, hidden_size = files.config, files.target.hidden_size
        files.check_fits(
            emb_dim=(int(config["emb_dim"]), hidden_size),
            vocab_size=(int(config["vocab_size"]), files.target.vocab_size),
        )
        check_options(files, config, _OPTIONS)
        if config.get("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
            raise files.refusal("architectures", config["architectures"], ARCHITECTURE)
        files.rename(lambda name: name.removeprefix("speculator."))
        self.reduction = replace(
            files.target.last_hidden_state(),
            epsilon=EPSILON,
            norm=torch.full((hidden_size,), 0.5**0.5) if config.get("scale_input") else None,
            projection=files.read("proj.0.weight", int(config.get("inner_dim") or config["emb_dim"]), hidden_size),
        )

    def load(self, files: HeadFiles) -> None:
        width, vocab_size, num_stages = self.reduction.width, files.target.vocab_size, int(files.config["n_predict"])
        if num_stages < 1:
            raise files.refusal("n_predict", num_stages, "1 or more")
        parts = (
            _of_stages(files, "emb.{}.weight", range(num_stages), vocab_size, width),
            [None, *_of_stages(files, "proj.{}.weight", range(1, num_stages), width, width)],
            _of_stages(files, "ln.{}.weight", range(num_stages), width),
            _of_stages(files, "ln.{}.bias", range(num_stages), width),
            _of_stages(files, "head.{}.weight", range(num_stages), vocab_size, width),
        )
        self._stages = [_Stage(*each) for each in zip(*parts, strict=True)]
        # By the last stage, the target's state weighs half.
        self._state_weight = 0.5 ** (0.5 / num_stages)
        self._embedding_weight = math.sqrt((1 - self._state_weight**2) * width / 2)
        self.spec = files.spec(self.form, width=width, max_depth=num_stages)

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        states = torch.empty_like(rows.features)
        for depth in set(rows.depths.tolist()):
            at_depth, stage = rows.depths == depth, self._stages[depth]
            state = rows.features[at_depth]
            if stage.projection is not None:
                state = functional.linear(state, stage.projection)
            token = functional.embedding(rows.token_ids[at_depth], stage.embedding)
            state = (state * self._state_weight + token * self._embedding_weight).float()
            # An RMS norm with a bias: means are not subtracted.
            state = (state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPSILON)).to(rows.features.dtype)
            states[at_depth] = functional.gelu(state * stage.norm_weight + stage.norm_bias)
        return states

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        logits = hidden.new_empty((len(hidden), self.spec.vocab_size), dtype=torch.float32)
        for depth in set(depths.tolist()):
            at_depth = depths == depth
            logits[at_depth] = functional.linear(hidden[at_depth], self._stages[depth].output).float()
        return logits


def _of_stages(files: HeadFiles, name: str, stages: range, *shape: int) -> list[Tensor]:
    """One tensor for each; tied stages share that of the first, of which there may be copies."""
    names = [name.format(stage) for stage in stages]
    if files.config.get("tie_weights"):
        files.drop(*names[1:])
        return [files.take(each, *shape) for each in names[:1]] * len(names)
    return [files.take(each, *shape) for each in names]
