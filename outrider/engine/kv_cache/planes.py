"""Planes: the named parts of a cache, such as keys and values. Nodes describe them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InternalError
from outrider.node import DTYPE_BYTES

FEATURE_PLANE_PREFIX = "feature-"


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A named plane of the cache, such as "k" or "v"; token-major: [layers, tokens, heads, head_dim]."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @property
    def is_feature(self) -> bool:
        """Whether it stores a drafter head's features (see `outrider.engine.feature_spec`). They are written at the end
        of a forward, whereas the layers of other planes are written one after another.
        """
        return self.name.startswith(FEATURE_PLANE_PREFIX)

    @property
    def bytes_per_head(self) -> int:
        """Bytes of one head of one token in one layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token_per_layer(self) -> int:
        return self.num_heads * self.bytes_per_head

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.bytes_per_token_per_layer

    def checked_heads(self, heads: range | None) -> range:
        """Returns the heads, by default all. Raises: InternalError if they are out of range."""
        if heads is None:
            return range(self.num_heads)
        if heads.step != 1 or not 0 <= heads.start < heads.stop <= self.num_heads:
            raise InternalError(f"{heads} is outside the {self.num_heads} heads of plane {self.name}")
        return heads


def find_plane(planes: Sequence[PlaneSpec], name: str) -> PlaneSpec:
    """Returns the plane of that name. Raises: InternalError if there is none."""
    for plane in planes:
        if plane.name == name:
            return plane
    raise InternalError(f"the KV cache has no plane {name!r}, only {', '.join(plane.name for plane in planes)}")
