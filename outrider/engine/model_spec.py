"""The sizes of a decoder that the cache, attention and scheduler need. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from outrider.engine.kv_cache.planes import LayerGroup, LinearAttention, PlaneSpec, stored_vectors


def windows_of(sliding_windows: Iterable[int | None], max_positions: int | None) -> tuple[int, ...]:
    """Returns `ModelSpec.windows` for layers with these windows. One as long as the checkpoint's `max_positions` (None:
    not stated) counts as none.

    Nodes with different settings must have the same planes, so a node's `max_model_len` does not count.
    """
    windows = tuple(each if each and (not max_positions or each < max_positions) else 0 for each in sliding_windows)
    return windows if any(windows) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a transformers decoder that stores K and V, or a latent vector, for each token."""

    architecture: str  # class name, such as "LlamaForCausalLM"
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # of queries and keys as attention multiplies them
    vocab_size: int  # number of rows of the output layer, padding included
    max_model_len: int  # maximum number of tokens in prompt and answer together
    dtype: str  # "float32", "bfloat16", "float16"
    is_extended: bool = False  # whether rotations are those beyond the original window; this changes all keys
    windows: tuple[int, ...] = ()  # sliding window of each layer, as in PlaneSpec; empty: no layer has one
    model_windows: tuple[int, ...] = ()  # those of the whole model, if these are some of its layers
    latent_dim: int = 0  # above 0: latent attention, see `stored_vectors`
    linear: LinearAttention | None = None  # the layers with linear attention; None: no layer has it
    features: PlaneSpec | None = None  # stored per token for a drafter head; see outrider.engine.feature_spec

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers that share blocks: first the layers without a window, then one group for each window,
        then the layers with linear attention.
        """
        windows = self.windows or (0,) * self.num_layers
        (keys, _), (values, _) = stored_vectors(self.head_dim, self.latent_dim)
        others = () if self.linear is None else self.linear.layers
        layers = [layer for layer in range(self.num_layers) if layer not in others]
        attending = (
            LayerGroup(tuple(layer for layer in layers if windows[layer] == window), window, (keys, values))
            for window in sorted({0, *windows, *self.model_windows})
        )
        return (*attending, *(() if self.linear is None else (self.linear.group,)))

    def of_layers(self, layers: range) -> ModelSpec:
        """Returns the specification of some of the layers. They form the groups of the model, some perhaps empty."""
        windows = self.windows[layers.start : layers.stop]
        return replace(self, num_layers=len(layers), windows=windows, model_windows=self.windows)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """The planes of the KV cache, in the order in which they are pushed."""
        widths = [width for _, width in stored_vectors(self.head_dim, self.latent_dim)]
        keys_and_values = (
            PlaneSpec(name, len(group.layers), self.num_kv_heads, width, self.dtype, group.window)
            for group in self.layer_groups
            if group.layers and not group.has_states
            for name, width in zip(group.plane_names, widths, strict=True)
        )
        of_linear = () if self.linear is None else self.linear.planes(self.dtype)
        return (*keys_and_values, *of_linear, *(() if self.features is None else (self.features,)))

    @property
    def attention_shape(self) -> dict[str, int]:
        """The arguments of `make_attention_backend` that tell the model's shape."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "latent_dim": self.latent_dim}

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, over all layers and planes but those of states."""
        return sum(plane.bytes_per_token for plane in self.planes if not plane.is_state)
