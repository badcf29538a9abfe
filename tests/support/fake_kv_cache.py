from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.engine.kv_cache.base import slots_of, slots_of_blocks
from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec
from outrider.errors import InternalError

_UNWRITTEN = -1


FEATURES = PlaneSpec("feature-scripted", 1, 1, 1, "float32")


class ScriptedKVCache:
    """A paged cache whose k is the token id and whose v is its position, in every layer. See PagedKVCache.

    A feature is the sum of both.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int = 2, features: PlaneSpec | None = FEATURES
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = num_layers
        self._features = features
        self.layer_groups = (LayerGroup(tuple(range(num_layers))),)
        self.window_blocks = ()
        keys_and_values = (PlaneSpec(name, num_layers, 1, 1, "float32") for name in ("k", "v"))
        self.planes = (*keys_and_values, *(() if features is None else (features,)))
        # Each is [num_layers, num_slots] int32: four bytes per token and layer, as the planes specify.
        self._slots = {
            plane.name: np.full((plane.num_layers, num_blocks * block_size), _UNWRITTEN, dtype=np.int32)
            for plane in self.planes
        }

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.move_slots(slots_of_blocks(pairs, self.block_size))

    def fence(self) -> None:
        """Does nothing, since writes are immediate."""

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        return (range(1),)

    def read(
        self, plane: str, layers: range, slots: Any, after: Any = None, *, heads: range | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the KV of `slots` ([num_tokens] integers: list, array or CPU tensor), layer by layer, as uint8."""
        taken = self._slots[plane][layers.start : layers.stop][:, np.asarray(slots)]
        return np.ascontiguousarray(taken).view(np.uint8).reshape(-1)

    def write(
        self,
        plane: str,
        layers: range,
        slots: Any,
        payload: bytes | bytearray | memoryview,
        after: Any = None,
        *,
        heads: range | None = None,
    ) -> None:
        """Writes what `read` returned. Raises InternalError if its size does not fit."""
        where = np.asarray(slots)
        values = np.frombuffer(payload, dtype=np.int32)
        stored = self._slots.get(plane)
        if stored is None or values.size != len(layers) * where.size or layers.stop > len(stored):
            raise InternalError(f"{values.size} values do not fit plane {plane!r}, {layers}, {where.size} slots")
        stored[layers.start : layers.stop, where] = values.reshape(len(layers), where.size)

    def save_block(self, plane: str, block_id: int, row: Any) -> None:
        row[:] = self.read(
            plane, range(len(self._slots[plane])), slots_of([block_id], self.block_size, self.block_size)
        )

    def load_block(self, plane: str, block_id: int, row: Any) -> None:
        self.write(
            plane, range(len(self._slots[plane])), slots_of([block_id], self.block_size, self.block_size), row.tobytes()
        )

    def write_token(self, layer: int, slot: int, *, token_id: int, position: int) -> None:
        self._slots["k"][layer, slot] = token_id
        self._slots["v"][layer, slot] = position

    def write_feature(self, slot: int, *, token_id: int, position: int) -> None:
        """Writes a token's feature, as a forward does after all layers."""
        if self._features is not None:
            self._slots[self._features.name][0, slot] = token_id + position

    def write_whole_token(self, slot: int, *, token_id: int, position: int) -> None:
        """Writes a token in all layers of all planes."""
        for layer in range(self.num_layers):
            self.write_token(layer, slot, token_id=token_id, position=position)
        self.write_feature(slot, token_id=token_id, position=position)

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        for stored in self._slots.values():
            stored[:, [destination for _, destination in pairs]] = stored[:, [source for source, _ in pairs]]

    def context(self, block_ids: Sequence[int], num_tokens: int, path: Sequence[int] = ()) -> list[int]:
        """Returns the first `num_tokens` tokens of a block table, then those of the slots `path`.

        Raises InternalError if a slot does not hold the KV and the feature of its position.
        """
        slots = np.concatenate([slots_of(block_ids, num_tokens, self.block_size), np.asarray(path, dtype=np.int64)])
        positions = np.arange(len(slots))
        token_ids, stored_positions = self._slots["k"][:, slots], self._slots["v"][:, slots]
        wrong = np.flatnonzero((stored_positions != positions).any(axis=0) | (token_ids != token_ids[0]).any(axis=0))
        if wrong.size:
            position = int(wrong[0])
            raise InternalError(f"slot {slots[position]} does not hold the KV of position {position}")
        if self._features is not None:
            wrong = np.flatnonzero(self._slots[self._features.name][0, slots] != token_ids[0] + positions)
            if wrong.size:
                raise InternalError(f"slot {slots[wrong[0]]} does not hold the feature of position {wrong[0]}")
        tokens: list[int] = token_ids[0].tolist()
        return tokens
