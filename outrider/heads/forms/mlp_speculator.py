"""MLPSpeculator: a small recurrent network over the target's last hidden state and the drafted tokens.

    state = GELU(norm_i(state_weight · proj_i(state) + emb_weight · emb_i(token)));  logits = head_i(state)

for the i-th token ahead; the first state is the target's last hidden state, rescaled where `scale_input` says so.
proj_0 only concerns the target's state, so it belongs to the reduction: a feature is as wide as the head's own state.

Source: Wertheimer et al. 2024, arXiv 2404.19124; names and formulas of fms-extras (fms_extras/models/speculator.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.features import FeatureReduction
from outrider.heads.base import Attend, HeadModel, HeadRows, HeadSpec
from outrider.heads.checkpoint import Checkpoint, Target, check_fits, refuse, spec_of
from outrider.heads.form import HeadForm

NAME = "mlp_speculator"
ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
EPSILON = 1e-6


class _Stage(NamedTuple):
    """What gives the i-th token ahead. Stages may share tensors."""

    embedding: Tensor  # [vocab_size, inner_dim]
    projection: Tensor | None  # [inner_dim, inner_dim]; None for the first stage: the reduction has made it
    norm_weight: Tensor  # [inner_dim]
    norm_bias: Tensor  # [inner_dim]
    output: Tensor  # [vocab_size, inner_dim]


class MLPSpeculatorHead(HeadModel):
    """The stages of one folder."""

    def __init__(self, spec: HeadSpec, reduction: FeatureReduction, stages: tuple[_Stage, ...]) -> None:
        self.spec = spec
        self.reduction = reduction
        self._stages = stages
        # By the last stage, the target's state weighs half.
        self._state_weight = 0.5 ** (0.5 / len(stages))
        self._embedding_weight = math.sqrt((1 - self._state_weight**2) * spec.width / 2)

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


def _is_form_of(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == NAME


def _reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    config, hidden_size = checkpoint.config, target.hidden_size
    check_fits(
        checkpoint.folder,
        emb_dim=(int(config["emb_dim"]), hidden_size),
        vocab_size=(int(config["vocab_size"]), target.vocab_size),
    )
    if config.get("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
        raise refuse(checkpoint.folder, "architectures", config["architectures"], ARCHITECTURE)
    return FeatureReduction(
        taps=(target.num_layers,),
        hidden_size=hidden_size,
        takes_final_norm=True,
        epsilon=EPSILON,
        norm=torch.full((hidden_size,), 0.5**0.5) if config.get("scale_input") else None,
        projection=checkpoint.tensor(_prefix(checkpoint) + "proj.0.weight", (_inner_dim(config), hidden_size)),
    )


def _open(checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> MLPSpeculatorHead:
    config, num_stages = checkpoint.config, int(checkpoint.config["n_predict"])
    if num_stages < 1:
        raise refuse(checkpoint.folder, "n_predict", num_stages, "1 or more")
    reduction = _reduction(checkpoint, target)
    prefix, width, vocab_size = _prefix(checkpoint), reduction.width, target.vocab_size
    read: dict[str, Tensor] = {}

    def tensor(name: str, stage: int, *shape: int, kind: str = "weight") -> Tensor:
        """Tied stages have one of each, but for the first projection."""
        if config.get("tie_weights"):
            stage = min(stage, 1 if name == "proj" else 0)
        full_name = f"{prefix}{name}.{stage}.{kind}"
        if full_name not in read:
            read[full_name] = checkpoint.tensor(full_name, shape).to(device, dtype)
        return read[full_name]

    stages = tuple(
        _Stage(
            embedding=tensor("emb", stage, vocab_size, width),
            projection=tensor("proj", stage, width, width) if stage else None,
            norm_weight=tensor("ln", stage, width),
            norm_bias=tensor("ln", stage, width, kind="bias"),
            output=tensor("head", stage, vocab_size, width),
        )
        for stage in range(num_stages)
    )
    spec = spec_of(NAME, checkpoint, target, dtype, width=width, max_depth=num_stages)
    return MLPSpeculatorHead(spec, reduction, stages)


def _inner_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("inner_dim") or config["emb_dim"])


def _prefix(checkpoint: Checkpoint) -> str:
    return "speculator." if "speculator.proj.0.weight" in checkpoint.tensor_names else ""


FORM = HeadForm(name=NAME, is_form_of=_is_form_of, reduction=_reduction, open=_open)
