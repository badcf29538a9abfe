"""The sizes of a decoder that the cache, attention and scheduler need. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.kv_cache.planes import PlaneSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a transformers decoder that stores plain K and V for each token."""

    architecture: str  # class name, such as "LlamaForCausalLM"
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # number of rows of the output layer, padding included
    max_model_len: int  # maximum number of tokens in prompt and answer together
    dtype: str  # "float32", "bfloat16", "float16"
    is_extended: bool = False  # whether rotations are those beyond the original window; this changes all keys
    features: PlaneSpec | None = None  # stored per token for a drafter head; see outrider.engine.feature_spec

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """The planes of the KV cache, in the order in which they are pushed."""
        keys_and_values = (
            PlaneSpec(name, self.num_layers, self.num_kv_heads, self.head_dim, self.dtype) for name in ("k", "v")
        )
        return (*keys_and_values, *(() if self.features is None else (self.features,)))

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, over all layers and planes."""
        return sum(plane.bytes_per_token for plane in self.planes)
