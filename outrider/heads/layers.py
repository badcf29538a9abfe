"""Decoder layers of the Llama family (RMS norm, rotary positions, grouped query heads, SwiGLU) for rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.features import rms_norm
from outrider.engine.rotation import inverse_frequencies
from outrider.engine.scaled_rotations import rope_parameters
from outrider.heads.base import Attend
from outrider.heads.head_files import HeadFiles

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DEFAULT_EPSILON = 1e-6  # the default of Llama and Qwen3
_EVERY_LAYER_ATTENDS = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The shape that all layers of a head have."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float  # of RMS norms

    @classmethod
    def read(cls, files: HeadFiles, config: Mapping[str, Any]) -> LayerShape:
        """Reads a configuration. Raises: ConfigError for an unsupported field; KeyError for a missing one."""
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise files.refusal("hidden_act", activation, "silu")
        types = set(config.get("layer_types") or ())
        if types - {_EVERY_LAYER_ATTENDS}:
            raise files.refusal("layer_types", sorted(types), _EVERY_LAYER_ATTENDS)
        num_heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
        shape = cls(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            epsilon=float(config.get("rms_norm_eps", _DEFAULT_EPSILON)),
        )
        if min(asdict(shape).values()) <= 0 or shape.num_heads % shape.num_kv_heads or head_dim % 2:
            raise files.refusal("the shape of layers", shape, "positive, heads in equal groups, an even head_dim")
        return shape


class Rotation:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of whole heads.

    A value in the first half of a head is rotated together with the value at the same index of the second half.
    """

    def __init__(self, files: HeadFiles, config: Mapping[str, Any], head_dim: int) -> None:
        """Raises: ConfigError if angles depend on the text's length or only a part of each head is rotated."""
        rope = rope_parameters(config)
        kind, turned = rope["rope_type"], rope.get("partial_rotary_factor") or 1.0
        if kind not in _ROPE_TYPES:
            raise files.refusal("rope_parameters.rope_type", kind, ", ".join(_ROPE_TYPES))
        if turned != 1.0:
            raise files.refusal("rope_parameters.partial_rotary_factor", turned, "1.0")
        self.scale = 1.0
        if kind == "default":
            frequencies = torch.from_numpy(inverse_frequencies(rope["rope_theta"], head_dim))
        else:
            # The import takes seconds, which a node with packed weights must not spend.
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            plain = LlamaConfig(**{**config, "model_type": "llama", "head_dim": head_dim})
            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](plain, torch.device("cpu"))
        self.frequencies = frequencies.to(files.device)  # [head_dim / 2] float32

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [num_rows, 1, head_dim / 2] float32 of positions [num_rows] int64."""
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates heads [num_rows, num_heads, head_dim] by angles from `Rotation.at`."""
    cosines, sines = angles
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(heads.dtype)


class DecoderLayer:
    """A layer of attention and a SwiGLU feed-forward part, each after a norm and added to the residual stream.

    Queries and keys are normalised per head if the checkpoint has such norms.
    """

    def __init__(
        self, files: HeadFiles, prefix: str, shape: LayerShape, index: int, *, width: int = 0, is_normed: bool = True
    ) -> None:
        """Takes the weights whose names begin with `prefix`, e.g. "layers.0.".

        `width`: the width of attention's input; 0: hidden_size. `is_normed`: whether the layer has an input norm.
        """
        self._shape = shape
        self._index = index
        hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self._sizes = (heads, *(2 * (shape.num_kv_heads * shape.head_dim,)))
        self._input_norm = files.take(f"{prefix}input_layernorm.weight", hidden) if is_normed else None
        self._projections = files.take_linear(
            {f"{attention}{name}_proj": size for name, size in zip("qkv", self._sizes, strict=True)}, width or hidden
        )
        self._query_norm = files.take_if(f"{attention}q_norm.weight", shape.head_dim)
        self._key_norm = files.take_if(f"{attention}k_norm.weight", shape.head_dim)
        self._output = files.take_linear({f"{attention}o_proj": hidden}, heads)
        self._norm = files.take(f"{prefix}post_attention_layernorm.weight", hidden)
        self._gate_and_up = files.take_linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, hidden)
        self._down = files.take_linear({f"{mlp}down_proj": hidden}, inner)

    def normed(self, rows: Tensor) -> Tensor:
        """Returns the rows after the input norm, or unchanged if there is none."""
        return self._by(self._input_norm, rows)

    def __call__(
        self,
        rows: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        attention_input: Tensor | None = None,
        *,
        places: Tensor | slice | None = None,
    ) -> Tensor:
        """Computes the layer for rows [num_rows, hidden_size]; returns the same shape.

        `attention_input`: the input of attention; None: `normed(rows)`. `places`: the indices of `rows` among the rows
        of `attention_input`; None: the two have the same rows.
        """
        given = self.normed(rows) if attention_input is None else attention_input
        rows = rows + self.attention(given, angles, attend, places)
        return rows + self.feed_forward(self.normed_again(rows))

    def attention(
        self, rows: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, places: Tensor | slice | None = None
    ) -> Tensor:
        """Returns attention's output [num_places, hidden_size] at `places`; None: at all rows.

        `rows`: [num_rows, width], after the input norm. All of them give keys and values.
        """
        head_dim, sizes = self._shape.head_dim, list(self._sizes)
        if places is None:
            projected = self._projections(rows)
        else:  # rows without an output need no query
            queries = self._projections.part(slice(sizes[0]))(rows[places])
            all_queries = queries.new_zeros(len(rows), sizes[0])
            all_queries[places] = queries
            projected = torch.cat([all_queries, self._projections.part(slice(sizes[0], None))(rows)], -1)
        query, key, value = (part.view(len(rows), -1, head_dim) for part in torch.split(projected, sizes, -1))
        query, key = rotate(self._by(self._query_norm, query), angles), rotate(self._by(self._key_norm, key), angles)
        attended = attend(self._index, query, key, value, head_dim**-0.5).reshape(len(rows), -1)
        return self._output(attended if places is None else attended[places])

    def normed_again(self, rows: Tensor) -> Tensor:
        """Returns the rows after the norm before the feed-forward part."""
        return self._by(self._norm, rows)

    def feed_forward(self, rows: Tensor) -> Tensor:
        gate, up = self._gate_and_up(rows).chunk(2, -1)
        return self._down(torch.nn.functional.silu(gate) * up)

    def _by(self, norm: Tensor | None, rows: Tensor) -> Tensor:
        return rows if norm is None else rms_norm(rows, norm, self._shape.epsilon)
