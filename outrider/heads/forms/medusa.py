"""Medusa: one small head for each later token, all of which read the target's last hidden state.

Head i is a few residual blocks, h + SiLU(W h + b), before an output layer. The hidden state from which the target
computes its token t + 1 is the input of all heads, and head i drafts token t + 2 + i. So a row's token is not used, its
state passes through `forward` unchanged, and head i computes the logits at depth i.

Source: Cai et al. 2024, arXiv 2401.10774; layouts of FasterDecoding/Medusa (`I.J.linear.*`, and `I.N.weight` if a
head has its own output layer) and of vLLM (`blocks.I.layers.J.*`, `lm_heads.I.weight`, `token_map`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from outrider.errors import ModelError
from outrider.heads.base import Attend, HeadModel, HeadRows, at_each_depth
from outrider.heads.head_files import HeadFiles, Linear
from outrider.heads.layouts import check_options

_PREFIX = re.compile(r"^medusa_heads?\.")
_OPTIONS = ("logit_scale", "original_lm_head")
_OF_TARGET = ("model.", "lm_head.")
_BLOCK_OF_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")


class _Head(NamedTuple):
    blocks: tuple[Linear, ...]  # [hidden_size, hidden_size] each
    output: Linear  # [draft_vocab_size, hidden_size]


class Medusa(HeadModel):
    """The Medusa heads of one folder."""

    form = "medusa"

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        return (
            "medusa_num_heads" in config
            or config.get("model_type") == cls.form
            or config.get("architectures") == ["MedusaModel"]
        )

    def __init__(self, files: HeadFiles) -> None:
        if not files.names and list(files.folder.glob("*.pt")):
            raise ModelError(
                f"{files.folder} has its weights in .pt files, which are not supported; convert them, e.g.: "
                f'python -c "import torch, safetensors.torch; safetensors.torch.save_file('
                f"torch.load('medusa_lm_head.pt', map_location='cpu', weights_only=True), "
                f"'medusa_lm_head.safetensors')\""
            )
        files.rename(lambda name: _BLOCK_OF_VLLM.sub(r"\1.\2.linear.", _PREFIX.sub("", name)))
        if "0.0.linear.weight" in files.names:
            width = files.read("0.0.linear.weight").shape[-1]
            files.check_fits(hidden_size=(width, files.target.hidden_size))
        self.reduction = files.target.last_hidden_state()

    def load(self, files: HeadFiles) -> None:
        config, width = files.config, files.target.hidden_size
        check_options(files, config, _OPTIONS)
        # In a checkpoint that includes the target, num_hidden_layers is the target's.
        keys = (
            ("medusa_num_heads", "medusa_num_layers")
            if "medusa_num_heads" in config
            else ("num_heads", "num_hidden_layers")
        )
        num_heads, num_blocks = int(config.get(keys[0], 0)), int(config.get(keys[1], 1))
        if num_heads < 1:
            raise files.refusal(keys[0], config.get(keys[0]), "1 or more")
        self.target_ids = _target_ids(files)
        self._logit_scale = float(config.get("logit_scale", 1.0))
        stored = cache(partial(_output, files, target_ids=self.target_ids))

        def output(head: int) -> Linear:
            """Takes a head's output layer. Heads may share a layer of the checkpoint or of the target."""
            own = [f"{head}.{num_blocks}.weight", f"lm_heads.{head}.weight"]
            if config.get("original_lm_head"):
                own += ["lm_head.weight", "lm_heads.0.weight"]
            return stored(next((name for name in own if name in files.names), ""))

        self._heads = [
            _Head(
                tuple(files.take_linear({f"{head}.{i}.linear": width}, width) for i in range(num_blocks)),
                output(head),
            )
            for head in range(num_heads)
        ]
        # The checkpoint may include the target, and more heads than its configuration asks for.
        files.drop(*(name for name in files.names if name.startswith(_OF_TARGET) or _number(name) >= num_heads))
        self.spec = files.spec(self.form, width=width, max_depth=num_heads)

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        return rows.features

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return at_each_depth(self._logits_of, depths, hidden)

    def _logits_of(self, depth: int, state: Tensor) -> Tensor:
        for block in self._heads[depth].blocks:
            state = state + functional.silu(block(state))
        return self._heads[depth].output(state * self._logit_scale).float()


def _output(files: HeadFiles, name: str, target_ids: Tensor | None) -> Linear:
    """Takes an output layer [num_ids, hidden_size]; the file may have rows for all ids.

    If `name` is empty, takes the target's output layer.
    """
    width, vocab_size = files.target.hidden_size, files.target.vocab_size
    if not name:
        return files.target_output(width, target_ids)
    weight = files.take(name)
    if target_ids is not None and len(weight) > len(target_ids):
        weight = weight[target_ids]
    num_ids = vocab_size if target_ids is None else len(target_ids)
    files.check_fits(vocab_size=(len(weight), num_ids), hidden_size=(weight.shape[1], width))
    return Linear(weight)


def _number(name: str) -> int:
    """Returns the index of the head that a tensor belongs to; -1 if it belongs to no head."""
    match = re.match(r"(?:lm_heads\.)?(\d+)\.", name)
    return int(match[1]) if match else -1


def _target_ids(files: HeadFiles) -> Tensor | None:
    size = files.config.get("truncated_vocab_size")
    if size is None or int(size) >= files.target.vocab_size:
        return None
    if "token_map" not in files.names:
        raise files.refusal("truncated_vocab_size", size, "this option with a tensor token_map")
    return files.ids("token_map", int(size))
