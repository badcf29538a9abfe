"""Layouts of config.json in the EAGLE family: nested in the `speculators` library, flat elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.heads.head_files import HeadFiles
from outrider.heads.layers import LayerShape, Rotation
from outrider.heads.spec import HeadSpec

_LAYER_TYPES = ("llama", "qwen3")
_HARMLESS = frozenset(
    {"use_cache", "tie_word_embeddings", "embed_requires_grad", "return_dict", "output_hidden_states", "qk_norm"}
    | {"attention_bias", "mlp_bias", "bias", "has_no_defaults_at_init"}  # these four follow from the tensors
    | {"do_sample", "initializer_factor", "partial_rotary_factor"}  # `Rotation` checks the last one
)
"""Options of published configurations that have no effect here or are read elsewhere."""

_SCALE = re.compile("scal|multiplier|factor")
_BOUND = re.compile("cap(ping)?$|limit|clip")
"""Patterns of the names of numeric options that change the result unless the scale is 1 or the bound is 0."""

MAX_PARALLEL = 64
"""The largest number of tokens that one forward may draft."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A head's configuration in either layout, checked against the target."""

    is_nested: bool  # whether it has the layout of speculators
    layer_config: Mapping[str, Any]  # the part of config.json that describes decoder layers
    shape: LayerShape
    draft_vocab_size: int

    @classmethod
    def read(cls, files: HeadFiles, *flags: str) -> Layout:
        """Reads a head's configuration. `flags`: names of options that the head's form knows.

        Raises: ConfigError for an unknown option, or if the head does not fit the target.
        """
        options, target = files.config, files.target
        nested = options.get("transformer_layer_config")
        own = options if nested is None else nested
        model_type = "llama" if nested is None else own.get("model_type", "qwen3")
        if model_type not in _LAYER_TYPES:
            raise files.refusal("transformer_layer_config.model_type", model_type, ", ".join(_LAYER_TYPES))
        for part in (options, own):
            check_options(files, part, flags)
        shape, vocab_size = LayerShape.read(files, own), int(own["vocab_size"])
        files.check_fits(
            hidden_size=(int(options.get("target_hidden_size") or shape.hidden_size), target.hidden_size),
            vocab_size=(vocab_size, target.vocab_size),
        )
        return cls(nested is not None, own, shape, int(options.get("draft_vocab_size") or vocab_size))

    def rotation(self, files: HeadFiles) -> Rotation:
        return Rotation(files, self.layer_config, self.shape.head_dim)

    def spec(self, files: HeadFiles, form: str, **fields: Any) -> HeadSpec:
        """Returns `HeadFiles.spec` of a head with layers of this shape."""
        # A head's own max_position_embeddings is ignored, since it only gives the length of the texts in its training.
        shape = self.shape
        names = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
        own = {name: getattr(shape, name) for name in names}
        return files.spec(form, **{**own, "width": shape.hidden_size, **fields})


def check_options(files: HeadFiles, part: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuses unknown options that may change the result: true flags, scales other than 1, bounds other than 0.

    `known`: names of options that the form reads. Raises: ConfigError.
    """
    for name, value in part.items():
        if name in _HARMLESS or name in known:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_scale = is_number and _SCALE.search(name) is not None and value != 1
        is_bound = is_number and _BOUND.search(name) is not None and value != 0
        if value is True or is_scale or is_bound:
            raise files.refusal(name, value, f"{', '.join(known) or 'none'} of the options that change the result")


def check_taps(files: HeadFiles, name: str, taps: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `taps`. Raises: ConfigError for layers that the target does not have, and for duplicates."""
    num_layers = files.target.num_layers
    if not taps or min(taps) < 0 or max(taps) > num_layers or len(set(taps)) < len(taps):
        raise files.refusal(name, list(taps), f"distinct numbers in 0 … {num_layers}, of layers of the target")
    return taps


def check_parallel(files: HeadFiles, num_parallel: int, mask_token_id: int) -> None:
    """Checks the options of a head that drafts `num_parallel` tokens in one forward. Raises: ConfigError."""
    if not 0 < num_parallel <= MAX_PARALLEL:
        raise files.refusal("the number of tokens in a forward", num_parallel, f"1 to {MAX_PARALLEL}")
    if not 0 <= mask_token_id < files.target.vocab_size:
        raise files.refusal("mask_token_id", mask_token_id, f"ids below {files.target.vocab_size}")
