"""Cached KV of a text piece, moved to another position of a prompt. Torch-free.

The method is CacheBlend's (Yao et al., EuroSys 2025, arXiv 2405.16444): keys are rotated to their new positions, and
the tokens whose values deviate most from those computed in context are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import from_bfloat16, to_bfloat16
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.engine.kv_cache.base import Bytes, Slots
from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.rotation import Floats, Turn

if TYPE_CHECKING:
    from outrider.engine.ranks.sharded_cache import KVCache
    from outrider.engine.runnable_model import RunnableModel

NUM_CHECKED_LAYERS = 2
"""Number of layers that are computed for all tokens, to choose those that are computed in all layers. The values of the
last of them are compared, as in CacheBlend."""


def can_be_moved(model: RunnableModel) -> bool:
    """Whether the model's cached KV can be moved to other positions: not that of latent or linear attention, sliding
    windows or stages, and only if native CPU kernels compute the whole model.
    """
    spec = model.spec
    if spec.latent_dim or spec.windows or spec.linear is not None or model.stage is not None:
        return False
    return isinstance(model.native, NativeDecoder)


@dataclass(frozen=True, slots=True)
class MovedKV:
    """KV of consecutive tokens as at other positions, in main memory."""

    rows: Mapping[str, Bytes]  # by plane, in the format of PagedKVCache.read

    @classmethod
    def read(cls, kv_cache: KVCache, slots: Slots, turns: Sequence[Turn | None]) -> MovedKV:
        """Reads the KV of some slots, and rotates its keys. `turns`: by layer; None: its keys are not rotated."""
        rows = {}
        (keys, _) = kv_cache.layer_groups[0].plane_names
        for plane in kv_cache.planes:
            taken = kv_cache.read(plane.name, range(plane.num_layers), slots)
            rows[plane.name] = turned(taken, plane, turns) if plane.name == keys else taken
        return cls(rows)

    def write(self, kv_cache: KVCache, slots: Slots) -> None:
        """Writes the KV of all layers into these slots, [num_tokens]."""
        for plane in kv_cache.planes:
            kv_cache.write(plane.name, range(plane.num_layers), slots, self.rows[plane.name].data)

    def deviations(self, kv_cache: KVCache, slots: Slots) -> npt.NDArray[np.float64]:
        """Returns how far the values in the last checked layer's slots are from these: their squared distance,
        [num_tokens].
        """
        (_, values) = kv_cache.layer_groups[0].plane_names
        plane = next(plane for plane in kv_cache.planes if plane.name == values)
        layer = min(NUM_CHECKED_LAYERS, plane.num_layers) - 1
        moved = to_floats(_words(self.rows[values], plane)[layer], plane)
        computed = to_floats(_words(kv_cache.read(values, range(layer, layer + 1), slots), plane, 1)[0], plane)
        return np.square(computed.astype(np.float64) - moved).sum(axis=(1, 2))


def turned(keys: Bytes, plane: PlaneSpec, turns: Sequence[Turn | None]) -> Bytes:
    """Returns keys of all layers, rotated further in float32 and rounded once. Both are in the format of
    PagedKVCache.read. Overwrites the argument.
    """
    for layer, turn in zip(_words(keys, plane), turns, strict=True):
        if turn is not None:
            half = len(turn.cosines)
            low, high = (to_floats(layer[..., start : start + half], plane) for start in (0, half))
            layer[..., :half] = _of_floats(low * turn.cosines - high * turn.sines, plane)
            layer[..., half : 2 * half] = _of_floats(high * turn.cosines + low * turn.sines, plane)
    return keys


def to_floats(words: Words, plane: PlaneSpec) -> Floats:
    """Returns a plane's numbers as float32."""
    return from_bfloat16(words) if plane.dtype == "bfloat16" else words.astype(np.float32)


def _of_floats(values: Floats, plane: PlaneSpec) -> Words:
    return to_bfloat16(values) if plane.dtype == "bfloat16" else values.astype(WORDS[plane.dtype])


def _words(rows: Bytes, plane: PlaneSpec, num_layers: int | None = None) -> Words:
    """Returns a view of rows of all layers, or of `num_layers`: [layers, tokens, heads, head_dim]."""
    words: Words = rows.view(WORDS[plane.dtype])
    return words.reshape(num_layers or plane.num_layers, -1, plane.num_heads, plane.head_dim)
