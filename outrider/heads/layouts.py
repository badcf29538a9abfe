"""How the publishers of heads of the EAGLE family write config.json: nested (speculators) or flat (the others)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.heads.base import HeadSpec
from outrider.heads.checkpoint import Checkpoint, Target, check_fits, refuse, spec_of
from outrider.heads.layers import LayerShape

_LAYER_TYPES = ("llama", "qwen3")
_HARMLESS = frozenset(
    {"use_cache", "tie_word_embeddings", "embed_requires_grad", "return_dict", "output_hidden_states", "qk_norm"}
    | {"attention_bias", "mlp_bias", "bias", "has_no_defaults_at_init"}  # tensors tell of biases and of qk_norm
)
"""Flags of published configurations that change nothing here when they are true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A head's configuration, whoever wrote it."""

    folder: Path
    options: Mapping[str, Any]  # config.json
    layer_config: Mapping[str, Any]  # the part of it that describes decoder layers
    shape: LayerShape
    is_nested: bool  # speculators' own
    target_hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target, *flags: str) -> Layout:
        """`flags`: options that the form knows. Raises: ConfigError for what is not known, or is of another target."""
        folder, options = checkpoint.folder, checkpoint.config
        nested = options.get("transformer_layer_config")
        own = options if nested is None else nested
        model_type = "llama" if nested is None else own.get("model_type", "qwen3")
        if model_type not in _LAYER_TYPES:
            raise refuse(folder, "transformer_layer_config.model_type", model_type, ", ".join(_LAYER_TYPES))
        for part in (options, own):
            check_flags(folder, part, flags)
        shape = LayerShape.read(folder, own)
        vocab_size = int(own["vocab_size"])
        layout = cls(
            folder=folder,
            options=options,
            layer_config=own,
            shape=shape,
            is_nested=nested is not None,
            target_hidden_size=int(options.get("target_hidden_size") or shape.hidden_size),
            vocab_size=vocab_size,
            draft_vocab_size=int(options.get("draft_vocab_size") or vocab_size),
        )
        check_fits(
            folder,
            hidden_size=(layout.target_hidden_size, target.hidden_size),
            vocab_size=(vocab_size, target.vocab_size),
        )
        return layout

    def head_spec(self, form: str, checkpoint: Checkpoint, target: Target, dtype: torch.dtype) -> HeadSpec:
        """The specification of a head that drafts one token after the other, to any depth."""
        # The target's longest text: a head's own figure is what it was trained on; its angles go on as the target's do.
        return spec_of(
            form,
            checkpoint,
            target,
            dtype,
            num_layers=self.shape.num_layers,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            width=self.shape.hidden_size,
        )


def check_flags(folder: Path, part: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises: ConfigError for a flag that is on and unknown: it may change what is computed."""
    for name, value in part.items():
        if value is True and name not in _HARMLESS and name not in known:
            raise refuse(folder, name, value, f"{', '.join(known)} among flags")


def architectures(config: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(config.get("architectures") or ())


def check_taps(folder: Path, name: str, taps: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Raises: ConfigError for layers that the target does not have, or for one twice."""
    if not taps or min(taps) < 0 or max(taps) > target.num_layers or len(set(taps)) < len(taps):
        raise refuse(folder, name, list(taps), f"different layers, each after 0 … {target.num_layers} of the target's")
    return taps
