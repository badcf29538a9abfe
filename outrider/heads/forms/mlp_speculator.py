"""MLPSpeculator: a small recurrent network over the target's last hidden state and the drafted tokens.

    state = GELU(norm_i(state_weight · proj_i(state) + emb_weight · emb_i(token)));  logits = head_i(state)

give the i-th token. The first state is the target's last hidden state, normalised if `scale_input` is set. proj_0 is
applied to the target's state only, so it belongs to the reduction, and a feature is as wide as the head's own state.

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

from outrider.heads.base import Attend, HeadModel, HeadRows, at_each_depth
from outrider.heads.head_files import HeadFiles
from outrider.heads.layouts import check_options

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
EPSILON = 1e-6
_OPTIONS = ("scale_input", "tie_weights")


class _Stage(NamedTuple):
    """A stage: the tensors that draft the i-th token. Stages may share tensors."""

    embedding: Tensor  # [vocab_size, inner_dim]
    projection: Tensor | None  # [inner_dim, inner_dim]; None in the first stage, whose projection is in the reduction
    norm_weight: Tensor  # [inner_dim]
    norm_bias: Tensor  # [inner_dim]
    output: Tensor  # [vocab_size, inner_dim]


class MLPSpeculator(HeadModel):
    """An MLPSpeculator head."""

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
        # The stages' weights together leave the target's state a share of one half in the last stage.
        self._state_weight = 0.5 ** (0.5 / num_stages)
        self._embedding_weight = math.sqrt((1 - self._state_weight**2) * width / 2)
        self.spec = files.spec(self.form, width=width, max_depth=num_stages)

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        return at_each_depth(self._states_of, rows.depths, rows.features, rows.token_ids)

    def _states_of(self, depth: int, state: Tensor, token_ids: Tensor) -> Tensor:
        stage = self._stages[depth]
        if stage.projection is not None:
            state = functional.linear(state, stage.projection)
        state = state * self._state_weight + functional.embedding(token_ids, stage.embedding) * self._embedding_weight
        # This is an RMS norm with a bias: means are not subtracted.
        wide = state.float()
        state = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(state.dtype)
        return functional.gelu(state * stage.norm_weight + stage.norm_bias)

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return at_each_depth(
            lambda depth, state: functional.linear(state, self._stages[depth].output).float(), depths, hidden
        )


def _of_stages(files: HeadFiles, name: str, stages: range, *shape: int) -> list[Tensor]:
    """Takes one tensor for each stage. Tied stages share the first one; the file may repeat it."""
    names = [name.format(stage) for stage in stages]
    own = names[:1] if files.config.get("tie_weights") else names
    files.drop(*names[len(own) :])
    tensors = [files.take(each, *shape) for each in own]
    return tensors if len(own) == len(names) else tensors * len(names)
