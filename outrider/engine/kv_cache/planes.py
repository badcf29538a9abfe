"""Planes: the named parts of a cache, such as keys and values. Nodes describe them to each other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InternalError
from outrider.node import DTYPE_BYTES

FEATURE_PLANE_PREFIX = "feature-"
KEPT_TOKENS = 64
"""The tokens that a sequence keeps of a sliding window begin at a multiple of this number. So nodes whose blocks have
different sizes, which divide it, keep and send the same tokens."""
STATE_INTERVAL = 16
"""Recurrent states are stored after numbers of tokens that are multiples of this number. It does not change bits."""
MAX_REPLAY = 48
"""Maximum number of tokens from a stored state to the first row of a step: one interval, and the drafts of the step
before, which are limited accordingly."""
STATE_PLANE, STATE_WINDOW = "state", 1
"""The plane of recurrent states. An entry is the state after some tokens, which a transfer sends as one token."""


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A named plane of the cache, such as "k" or "v"; token-major: [layers, tokens, heads, head_dim]."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    window: int = 0  # rows see at most this number of tokens, their own included; 0: all tokens before them

    @property
    def is_feature(self) -> bool:
        """Whether it stores a drafter head's features (see `outrider.engine.feature_spec`). They are written at the end
        of a forward, whereas the layers of other planes are written one after another.
        """
        return self.name.startswith(FEATURE_PLANE_PREFIX)

    @property
    def is_values(self) -> bool:
        """Whether it stores values, or the latent vectors that are values, and not keys or features."""
        return self.name.startswith(("v", "latent"))

    @property
    def is_state(self) -> bool:
        """Whether its entries are recurrent states, each in a slot of a StatePool."""
        return self.name == STATE_PLANE

    @property
    def is_attended(self) -> bool:
        """Whether attention reads it."""
        return not (self.is_feature or self.is_state or self.name.startswith("rows"))

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


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values are stored in the same blocks: a block has the same number in all of them.

    A model has a group for the layers that see all tokens, which may be empty, and one for each sliding window. Layers
    with linear attention are a group whose window is the most tokens that a replay reads before a row.
    """

    layers: tuple[int, ...]  # of the model, ascending; layer i of the group's planes is layers[i]
    window: int = 0  # as in PlaneSpec
    stored: tuple[str, ...] = ("k", "v")  # what attention reads as keys and as values, see `stored_vectors`
    has_states: bool = False  # whether the layers also have the plane STATE_PLANE

    @property
    def plane_names(self) -> tuple[str, ...]:
        """The names of the planes of what is stored for each token."""
        suffix = f"-{self.window}" if self.window else ""
        return tuple(f"{name}{suffix}" for name in self.stored)

    def places(self, layers: range) -> range:
        """Returns which layers of the group's planes are the given layers of the model."""
        return range(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop))


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """The layers of a model with linear attention (see outrider.engine.linear_attention), which are of one shape."""

    layers: tuple[int, ...]
    row_width: int  # numbers that a layer stores of a token
    num_heads: int
    state_size: int  # numbers in the state of one head
    kernel_size: int  # of the convolution over tokens

    @property
    def group(self) -> LayerGroup:
        """The layers' group. Its window reaches from a step's first row to the first one that a replay reads."""
        return LayerGroup(self.layers, MAX_REPLAY + self.kernel_size, ("rows",), has_states=True)

    def planes(self, dtype: str) -> tuple[PlaneSpec, PlaneSpec]:
        """The planes of rows and of states."""
        (name,), num_layers = self.group.plane_names, len(self.layers)
        rows = PlaneSpec(name, num_layers, 1, self.row_width, dtype, self.group.window)
        return rows, PlaneSpec(STATE_PLANE, num_layers, self.num_heads, self.state_size, "float32", STATE_WINDOW)


def last_border(num_tokens: int) -> int:
    """Returns after how many tokens the state is that `num_tokens` valid tokens need, of which the last one may be
    computed again; 0: none.
    """
    return max(num_tokens - 1, 0) // STATE_INTERVAL * STATE_INTERVAL


def stored_vectors(head_dim: int, latent_dim: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Returns the names and widths of what a layer stores of a token: what attention reads as keys and as values.

    Latent attention (`latent_dim` > 0) has keys of `head_dim` numbers, of which the first `latent_dim` are the value as
    well. This latent vector is stored once, and the key's other numbers, which are rotated, beside it.
    """
    if latent_dim:
        return ("rope", head_dim - latent_dim), ("latent", latent_dim)
    return ("k", head_dim), ("v", head_dim)


def first_kept_token(num_tokens: int, window: int) -> int:
    """Returns the first token that a sequence of `num_tokens` valid tokens keeps for the layers with this window.

    That is one token more than the next row sees, since the last token may be computed again, and up to KEPT_TOKENS
    more. Without a window (0), it keeps all tokens.
    """
    return max(num_tokens - window, 0) // KEPT_TOKENS * KEPT_TOKENS if window else 0


def first_sent_token(plane: PlaneSpec, start_token: int, end_token: int) -> int:
    """Returns the first token that a transfer of tokens [start_token, end_token) carries in this plane."""
    if plane.is_state:
        return end_token - 1 if last_border(end_token) else end_token
    return first_kept_token(end_token, plane.window) if plane.window else start_token


def find_plane(planes: Sequence[PlaneSpec], name: str) -> PlaneSpec:
    """Returns the plane of that name. Raises: InternalError if there is none."""
    for plane in planes:
        if plane.name == name:
            return plane
    raise InternalError(f"the KV cache has no plane {name!r}, only {', '.join(plane.name for plane in planes)}")
