"""The memory of the block pool's blocks: keys and values of every layer. Torch-free if native kernels are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.engine.kv_cache.base import Bytes, CachePlane, PlaneMaker, Slots, slots_of_blocks
from outrider.engine.kv_cache.planes import LayerGroup, PlaneSpec, find_plane
from outrider.errors import InternalError

if TYPE_CHECKING:
    from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceBytes, DeviceRows


class PagedKVCache:
    """Keys and values of all layers, addressed by slot = block_id * block_size + offset.

    The cache is memory only; the BlockPool assigns blocks. All of it is allocated at once, but the operating
    system commits memory only when blocks are first written.

    Thread-safe for disjoint blocks: threads may read, write and run forwards at the same time as long as no block that
    one of them writes is used by another.
    """

    def __init__(
        self,
        planes: Sequence[PlaneSpec],
        *,
        num_blocks: int,
        block_size: int,
        device: str = "cpu",
        num_scratch_blocks: int = 0,
        kernels: PlaneMaker | None = None,
        layer_groups: Sequence[LayerGroup] = (),
        window_blocks: Sequence[int] | None = None,
        state_slots: int = 0,
    ) -> None:
        """`device`: torch's name of the device, such as "cuda:0".

        `num_blocks`: number of blocks of the layers without a window. `window_blocks`: of those of each window; None:
        as many, and a sequence has one block table for all layers. `state_slots`: number of recurrent states.

        `layer_groups`: the groups of layers, as in ModelSpec; by default one.

        `num_scratch_blocks`: number of additional blocks in each group, numbered after its others, for rows that pad a
        batch.

        `kernels`: the CPU kernels that attend over the cache and determine its layout; None if torch or a GPU attends.
        """
        self.planes = tuple(planes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        own = LayerGroup(tuple(range(planes[0].num_layers)), stored=(planes[0].name, planes[1].name))
        self.layer_groups = tuple(layer_groups) or (own,)
        for group in self.layer_groups:
            sizes = {plane.num_layers for plane in planes if plane.name in group.plane_names}
            assert sizes == ({len(group.layers)} if group.layers else set()), "the groups are those of the planes"
        windows = self.layer_groups[1:]
        self.state_slots = state_slots
        self.window_blocks = (num_blocks,) * len(windows) if window_blocks is None else tuple(window_blocks)
        self.num_tables = 1 if window_blocks is None else len(self.layer_groups)  # block tables of a sequence
        self.scratch_blocks: tuple[int, ...] = ()
        """The first scratch block of each block table's group."""
        if num_scratch_blocks:
            self.scratch_blocks = (num_blocks, *self.window_blocks)[: self.num_tables]
        self.copies: CopyStream | None = None  # on a GPU only
        if kernels is None:
            from outrider.engine.kv_cache.tensor_planes import TensorMemory  # imports torch

            kernels = tensors = TensorMemory(device)
            self.copies = tensors.copies
        of_groups = zip(self.layer_groups, (num_blocks, *self.window_blocks), strict=True)
        by_window = {group.window: num for group, num in of_groups}
        self._planes: dict[str, CachePlane] = {}
        self._num_slots: dict[str, int] = {}  # without scratch blocks
        for plane in planes:
            if plane.is_state:
                num, size, num_scratch = state_slots, 1, 0
            else:
                num, size, num_scratch = by_window[plane.window], block_size, num_scratch_blocks
            self._planes[plane.name] = kernels.make_plane(plane, num_blocks=num + num_scratch, block_size=size)
            self._num_slots[plane.name] = num * size
        self.group_of = _by_layer({layer: at for at, group in enumerate(self.layer_groups) for layer in group.layers})
        self.keys, self.values = (self._of_all_layers(side) for side in range(2))

    def _of_all_layers(self, side: int) -> Any:
        """Returns the keys (side 0) or values (1) of every layer of the model, by its number; of a layer with linear
        attention, its rows.
        """
        groups = [
            (group.layers, self._planes[group.plane_names[0 if group.has_states else side]].layers)
            for group in self.layer_groups
            if group.layers
        ]
        if len(groups) == 1:
            return groups[0][1]
        return _by_layer({layer: each for layers, own in groups for layer, each in zip(layers, own, strict=True)})

    def layers(self, plane: str) -> Any:
        """Returns a plane's layers, by number: tensors [num_blocks, block_size, heads, dim].

        With native kernels they are arrays instead: keys and values in the kernels' packed layout, and features in the
        shape of the tensors (for the dtype see WORDS).
        """
        return self._planes[plane].layers

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, each given as (source, destination), in all layers and planes.

        All sources are read before any destination is written, so a block may be both source and destination.
        """
        self.move_slots(slots_of_blocks(pairs, self.block_size))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies single slots, given as (source, destination), in all layers and planes. All sources are read first.

        If sequences have a table for each group of layers, the slots of all groups are numbered together: those of a
        window after those of the group before.
        """
        if not pairs:
            return
        moves, first = np.array(pairs, dtype=np.int64).T, 0
        if self.num_tables == 1:
            for spec in self.planes:
                if not spec.is_state:
                    self._planes[spec.name].move_slots(moves)
            return
        for group, num_blocks in zip(self.layer_groups, (self.num_blocks, *self.window_blocks), strict=True):
            num_slots = num_blocks * self.block_size
            own = moves[:, (first <= moves[0]) & (moves[0] < first + num_slots)] - first
            for spec in self.planes if own.size else ():
                if spec.window == group.window:
                    self._planes[spec.name].move_slots(own)
            first += num_slots

    def block(self, plane: str, block_id: int) -> Any:
        """Returns a block in all layers of a plane, in the plane's own layout: a view. See CachePlane.block."""
        return self._planes[plane].block(block_id)

    def save_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Copies a block of a cache in main memory to `row`, [block_size * bytes_per_token] uint8."""
        block = self.block(plane, block_id)
        np.copyto(row.reshape(block.shape), block)

    def load_block(self, plane: str, block_id: int, row: Bytes) -> None:
        """Copies to a block what `save_block` copied from one of the same cache."""
        block = self.block(plane, block_id)
        np.copyto(block, row.reshape(block.shape))

    def fence(self) -> Any:
        """Returns a marker of the work queued so far, for `read` and `write`; None on a CPU, which queues no work."""
        return None if self.copies is None else self.copies.fence()

    def head_ranges(self, plane: str) -> tuple[range, ...]:
        """Returns the ranges of heads that are cheapest to read separately: here one range of all heads."""
        return (range(find_plane(self.planes, plane).num_heads),)

    def read(self, plane: str, layers: range, slots: Slots, after: Any = None, *, heads: range | None = None) -> Bytes:
        """Returns the KV of `slots` ([num_tokens] int64) in `layers`: [len(layers) * num_tokens * heads * dim *
        itemsize] uint8, contiguous, layer by layer, token-major.

        `after`: on a GPU, the fence after which to read; by default a fence after all work queued so far. `heads`: a
        subset of the heads; by default all.

        Raises: InternalError if a range is outside the cache.
        """
        heads = self._checked(plane, layers, slots, heads)
        return self._planes[plane].read(layers, slots, heads, after)

    def take(self, plane: str, layers: range, slots: Slots, after: Any, *, heads: range | None = None) -> DeviceRows:
        """Waits for the fence `after`, then returns what `read` would read, on the cache's GPU and not copied yet."""
        heads = self._checked(plane, layers, slots, heads)
        on_gpu: Any = self._planes[plane]
        assert self.copies is not None
        return self.copies.take(on_gpu.rows(layers, heads), slots, after)

    def write(
        self,
        plane: str,
        layers: range,
        slots: Slots,
        payload: bytes | bytearray | memoryview | DeviceBytes,
        after: Any = None,
        *,
        heads: range | None = None,
    ) -> None:
        """Writes bytes in the format of `read`. On a GPU it first waits for the fence `after`, since earlier work may
        still use the slots.

        Without `after`, it waits for all work queued so far, which may take as long as a step on a busy node.

        Raises: InternalError, with nothing written, if a range or the size does not fit.
        """
        heads = self._checked(plane, layers, slots, heads)
        expected = len(layers) * slots.size * len(heads) * find_plane(self.planes, plane).bytes_per_head
        rows: Any = payload
        if isinstance(payload, (bytes, bytearray, memoryview)):
            rows = np.frombuffer(payload, dtype=np.uint8)
        if len(rows) != expected:
            raise InternalError(f"{len(rows)} bytes instead of {expected} for plane {plane}, layers {layers}")
        if expected:
            self._planes[plane].write(layers, slots, heads, rows, after)

    def _checked(self, plane: str, layers: range, slots: Slots, heads: range | None) -> range:
        """Checks all bounds and returns `heads`, or all heads of the plane if it is None."""
        spec = find_plane(self.planes, plane)
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= spec.num_layers:
            raise InternalError(f"{layers} is outside the {spec.num_layers} layers of plane {plane}")
        num_slots = self._num_slots[plane]
        if slots.size and not 0 <= slots.min() <= slots.max() < num_slots:
            raise InternalError(f"some slots are outside the {num_slots} of plane {plane}")
        return spec.checked_heads(heads)


def _by_layer(values: dict[int, Any]) -> list[Any]:
    """Returns the values in the order of layers."""
    return [values[layer] for layer in sorted(values)]
