"""Medusa: one small head for each token ahead, all fed with the target's last hidden state.

Head i is a few residual blocks, h + SiLU(W h + b), before an output layer. The hidden state behind which the target
itself gives token t + 1 goes into all of them; head i gives token t + 2 + i. So the token that a row is fed says
nothing more, the state passes through unchanged, and depth i is head i's.

Source: Cai et al. 2024, arXiv 2401.10774; layouts of FasterDecoding/Medusa (`I.J.linear.*`, and `I.N.weight` where a
head has an output layer of its own) and of vLLM (`blocks.I.layers.J.*`, `lm_heads.I.weight`, `token_map`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.features import FeatureReduction
from outrider.errors import ModelError
from outrider.heads.base import Attend, HeadModel, HeadRows, HeadSpec
from outrider.heads.checkpoint import Checkpoint, Target, check_fits, check_target_ids, refuse, spec_of
from outrider.heads.form import HeadForm

NAME = "medusa"
_PREFIXES = ("medusa_heads.", "medusa_head.")


class _Head(NamedTuple):
    blocks: tuple[tuple[Tensor, Tensor | None], ...]  # [hidden_size, hidden_size] and [hidden_size] of each
    output: Tensor  # [draft_vocab_size, hidden_size]


class MedusaHead(HeadModel):
    """All heads of one folder."""

    def __init__(
        self,
        spec: HeadSpec,
        reduction: FeatureReduction,
        heads: tuple[_Head, ...],
        target_ids: Tensor | None,
        logit_scale: float,
    ) -> None:
        self.spec = spec
        self.reduction = reduction
        self.target_ids = target_ids
        self._heads = heads
        self._logit_scale = logit_scale

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        return rows.features

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        logits = hidden.new_empty((len(hidden), len(self._heads[0].output)), dtype=torch.float32)
        for depth in set(depths.tolist()):
            at_depth = depths == depth
            state = hidden[at_depth]
            for weight, bias in self._heads[depth].blocks:
                state = state + functional.silu(functional.linear(state, weight, bias))
            logits[at_depth] = functional.linear(state, self._heads[depth].output).float() * self._logit_scale
        return logits


def _is_form_of(config: Mapping[str, Any]) -> bool:
    return (
        "medusa_num_heads" in config
        or config.get("model_type") == NAME
        or config.get("architectures") == ["MedusaModel"]
    )


def _reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    stored = _stored_names(checkpoint)
    first = stored.get("0.0.linear.weight") or stored.get("blocks.0.layers.0.weight")
    if first is not None:
        check_fits(checkpoint.folder, hidden_size=(checkpoint.tensor(first).shape[1], target.hidden_size))
    return FeatureReduction(taps=(target.num_layers,), hidden_size=target.hidden_size, takes_final_norm=True)


def _open(checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> MedusaHead:
    config, folder = checkpoint.config, checkpoint.folder
    # A checkpoint that is the whole target as well keeps the target's num_hidden_layers beside medusa_num_heads.
    keys = (
        ("medusa_num_heads", "medusa_num_layers")
        if "medusa_num_heads" in config
        else ("num_heads", "num_hidden_layers")
    )
    num_heads, num_blocks = int(config.get(keys[0], 0)), int(config.get(keys[1], 1))
    if num_heads < 1:
        raise refuse(folder, keys[0], config.get(keys[0]), "1 or more")
    reduction = _reduction(checkpoint, target)
    stored, width = _stored_names(checkpoint), target.hidden_size

    def read(*names: str, shape: tuple[int, ...] | None = None) -> Tensor:
        name = next((stored[name] for name in names if name in stored), names[0])
        return checkpoint.tensor(name, shape).to(device, dtype)

    def block(head: int, layer: int) -> tuple[Tensor, Tensor | None]:
        ours, theirs = f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}"
        has_bias = f"{ours}.bias" in stored or f"{theirs}.bias" in stored
        bias = read(f"{ours}.bias", f"{theirs}.bias", shape=(width,)) if has_bias else None
        return read(f"{ours}.weight", f"{theirs}.weight", shape=(width, width)), bias

    target_ids = _target_ids(checkpoint, target, stored)
    outputs: dict[str, Tensor] = {}

    def output(head: int) -> Tensor:
        """Several heads may share one: of the checkpoint, or the target's."""
        own = [f"{head}.{num_blocks}.weight", f"lm_heads.{head}.weight"]
        if config.get("original_lm_head"):
            own += ["lm_head.weight", "lm_heads.0.weight"]
        name = next((stored[name] for name in own if name in stored), "")
        if name not in outputs:
            weight = checkpoint.tensor(name) if name else target.output_layer()
            if target_ids is not None and len(weight) > len(target_ids):
                weight = weight[target_ids]
            num_ids = target.vocab_size if target_ids is None else len(target_ids)
            check_fits(folder, vocab_size=(len(weight), num_ids), hidden_size=(weight.shape[1], width))
            outputs[name] = weight.to(device, dtype)
        return outputs[name]

    heads = tuple(
        _Head(tuple(block(head, layer) for layer in range(num_blocks)), output(head)) for head in range(num_heads)
    )
    return MedusaHead(
        spec_of(NAME, checkpoint, target, dtype, width=width, max_depth=num_heads),
        reduction,
        heads,
        None if target_ids is None else target_ids.to(device),
        float(config.get("logit_scale", 1.0)),
    )


def _stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names without the prefixes that some publishers give them → names in the files."""
    if not checkpoint.tensor_names and list(checkpoint.folder.glob("*.pt")):
        raise ModelError(
            f"{checkpoint.folder} has its weights in .pt files, which are not read; convert them, as in: "
            f'python -c "import torch, safetensors.torch; safetensors.torch.save_file('
            f"torch.load('medusa_lm_head.pt', map_location='cpu', weights_only=True), 'medusa_lm_head.safetensors')\""
        )
    names: dict[str, str] = {}
    for name in checkpoint.tensor_names:
        short = name
        for prefix in _PREFIXES:
            short = short.removeprefix(prefix)
        names[short] = name
    return names


def _target_ids(checkpoint: Checkpoint, target: Target, stored: Mapping[str, str]) -> Tensor | None:
    size = checkpoint.config.get("truncated_vocab_size")
    if size is None or int(size) >= target.vocab_size:
        return None
    if "token_map" not in stored:
        raise refuse(checkpoint.folder, "truncated_vocab_size", size, "with a tensor token_map")
    target_ids = checkpoint.mapped(stored["token_map"], (int(size),)).long()
    check_target_ids(checkpoint.folder, "token_map", target_ids, target.vocab_size)
    return target_ids


FORM = HeadForm(name=NAME, is_form_of=_is_form_of, reduction=_reduction, open=_open)
