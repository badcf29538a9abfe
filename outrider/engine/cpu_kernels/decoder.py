"""A whole decoder in one native call, for the families of models in decoder_options.py.

The caller that packs the weights compares the logits with the original model's (see outrider.model_hub.support).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import Array
from outrider.engine.cpu_kernels.adapter import addresses_of_rows
from outrider.engine.cpu_kernels.decoder_weights import LAYER_MATRICES, LAYER_NORMS, DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.interface import address_of, layout_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.rotation import Turn
from outrider.engine.runner_base import ModelRunner
from outrider.engine.stages import Stage
from outrider.errors import InternalError

Logits = npt.NDArray[np.float32]
_BATCH = layout_of(structures.OutriderBatch)
# A draft of fewer multiplications keeps Python's lock, and need not wait for the event loop afterwards. It takes one or
# two milliseconds on a server processor, and elsewhere less than the five for which a thread may keep it (an estimate).
# Reading the weights of a large head takes as long as multiplying them by about four rows.
_SHORT_DRAFT, _MIN_ROWS = 1 << 29, 4


class NativeDecoder:
    """A whole model for forward passes with our paged cache. The state of a step is in a workspace."""

    def __init__(self, kernels: CpuKernels, weights: DecoderWeights) -> None:
        """`weights` must be packed for the path of `kernels`."""
        self.kernels = kernels
        self.weights = weights  # keeps the structures' memory alive
        shape = weights.shape
        self._layers = (structures.OutriderLayer * shape.num_layers)(
            *(_layer(weights, index) for index in range(shape.num_layers))
        )
        head = weights.matrix("head")
        blobs = {name: weights.address(name) for name in ("embedding", "final_norm", "feature_norm")}
        self.struct = structures.OutriderDecoder(
            vocab_size=head.out_features,
            type=shape.element_type,
            head=head,
            layers=ctypes.addressof(self._layers),
            **blobs,
            **{name: getattr(shape, name) for name, _ in structures.OutriderDecoder._fields_ if hasattr(shape, name)},
        )

    def of_layers(self, layers: range) -> NativeDecoder:
        """Returns a decoder for steps that compute only these layers. It keeps no weights of others in memory."""
        others = {str(layer) for layer in range(self.weights.shape.num_layers) if layer not in layers}
        blobs = {name: blob for name, blob in self.weights.blobs.items() if name.partition(".")[0] not in others}
        return NativeDecoder(self.kernels, DecoderWeights(self.weights.shape, blobs))


def _layer(weights: DecoderWeights, index: int) -> ctypes.Structure:
    norms = {name: weights.address(f"{index}.{name}") for name in LAYER_NORMS}
    matrices = {name: weights.matrix(f"{index}.{name}") for name in LAYER_MATRICES}
    rotation = {name: weights.address(f"{name}.{weights.shape.rotations[index]}") for name in ("cosines", "sines")}
    window = weights.shape.sliding_windows[index]
    return structures.OutriderLayer(**norms, **matrices, **rotation, sliding_window=window)


class NativeStep(ModelRunner):
    """A runner for one workspace and one cache. Not thread-safe."""

    attention_name = "native"

    def __init__(
        self,
        decoder: NativeDecoder,
        kv_cache: PagedKVCache,
        features: FeatureSpec | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`kv_cache` must be made for these kernels. `features`: what each row writes to the cache's feature plane.
        `stage`: the layers to compute, which are those of the cache; None: all.
        """
        self._decoder = decoder  # keeps the structure's memory alive
        self._struct = struct = decoder.struct
        self._kv_cache = kv_cache
        self._functions = decoder.kernels.library.functions
        self._short_functions = decoder.kernels.library.functions_holding_lock
        sizes = decoder.weights.shape.matrix_sizes.values()
        self._row_products = sum(size.out_features * size.in_features for size in sizes)  # of a row with logits
        self.phases = workspace = Workspace(decoder.kernels.library)
        self._context = decoder.kernels.team, workspace.handle, struct  # what every function takes first
        self._layers = range(struct.num_layers) if stage is None else stage.layers
        self._is_last = stage is None or stage.is_last
        pointers, earlier = ctypes.c_void_p * struct.num_layers, [0] * self._layers.start
        if not isinstance(kv_cache.keys[0], np.ndarray):  # tensors for torch
            raise InternalError("a native decoder needs a KV cache that was made for its kernels")
        self._keys = pointers(*earlier, *(keys.ctypes.data for keys in kv_cache.keys))
        self._values = pointers(*earlier, *(values.ctypes.data for values in kv_cache.values))
        self._group_of = (ctypes.c_int32 * struct.num_layers)(*earlier, *kv_cache.group_of)
        self._features = self._reduction = None
        if features is not None:
            if not isinstance(features, PackedReduction):
                reduction: Any = features  # a FeatureReduction, whose module imports torch
                features = reduction.pack(decoder.kernels, decoder.weights.shape.element_type)
            assert isinstance(features, PackedReduction)
            self._reduction = features  # keeps the structure's memory alive
            self._features = features.struct(kv_cache.layers(features.plane_name)[0])
        elif stage is not None and stage.taps:  # only recorded, for the last stage
            self._taps = np.asarray(stage.taps, dtype=np.int64)
            self._features = structures.OutriderFeatures(num_taps=len(stage.taps), taps=address_of(self._taps))
        self._num_taps = 0 if self._features is None else self._features.num_taps
        self.state_bytes: int = self._functions.outrider_state_size(struct, self._num_taps)
        """Bytes of a row's state between two stages."""

    def forward(
        self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None, states: Array | None = None
    ) -> Array:
        """Implements ModelRunner.forward: returns [num_logits, vocab_size].

        A stage that is not the first takes the rows' `states` after the stage before it; one that is not the last
        returns them: [num_rows, state_bytes] uint8.
        """
        struct, _adapters = self._struct_of(batch)
        rows = *self._context[1:], batch.num_rows, self._num_taps
        if states is not None:
            self._functions.outrider_load_states(*rows, np.asarray(states).ctypes.data)
        if on_layer_done is None:
            self._run_layers(struct, self._layers.start, self._layers.stop)
        else:
            for layer in self._layers:
                self._run_layers(struct, layer, layer + 1)
                on_layer_done(layer)
        if not self._is_last:
            left = self.empty_states(batch.num_rows)
            self._functions.outrider_save_states(*rows, left.ctypes.data)
            return left
        num_logits, width, rows_with_logits = batch.num_logits, self._struct.vocab_size, batch.arrays.logits_rows
        logits: Logits = np.empty((num_logits, width), dtype=np.float32)
        self._functions.outrider_decoder_logits(
            *self._context, _address(rows_with_logits), num_logits, logits.ctypes.data, None, width, None
        )
        return logits

    def empty_states(self, num_rows: int) -> npt.NDArray[np.uint8]:
        """Allocates the states of rows between two stages: [num_rows, state_bytes]."""
        return np.empty((num_rows, self.state_bytes), dtype=np.uint8)

    def compute_layers(self, batch: InputBatch, num_layers: int) -> None:
        """Implements ModelRunner.compute_layers."""
        struct, _adapters = self._struct_of(batch)
        self._run_layers(struct, 0, num_layers)

    def turns(self, num_positions: int) -> list[Turn | None]:
        """Implements ModelRunner.turns."""
        return [self._decoder.weights.turn(layer, num_positions) for layer in self._layers]

    def draft(self, batch: InputBatch, features: Words, sampler: int, paths: ctypes.Array[Any], drafts: Any) -> None:
        """Runs a drafter head (`outrider_draft`), without Python's lock unless it is short.

        `features`: [num_rows, hidden_size], the head's input in addition to the tokens. `sampler`: the address of one
        for the head's ids. `paths`: OutriderPath, one for each row with logits; `drafts`: OutriderDrafts.
        """
        struct = batch_struct(batch)
        features = np.ascontiguousarray(features)
        struct.features = features.ctypes.data
        num_rows = max(batch.num_rows, _MIN_ROWS) + max(batch.num_logits, _MIN_ROWS) * (drafts.max_tokens - 1)
        functions = self._short_functions if num_rows * self._row_products < _SHORT_DRAFT else self._functions
        functions.outrider_draft(*self._context, struct, self._keys, self._values, sampler, paths, drafts)

    def _struct_of(self, batch: InputBatch) -> tuple[ctypes.Structure, array[int] | None]:
        """Returns an OutriderBatch, and memory of its adapters that the caller must keep alive."""
        struct, adapters = batch_struct(batch), None
        if batch.num_groups > 1:
            struct.group_of = ctypes.addressof(self._group_of)
        if batch.adapters:
            adapters = addresses_of_rows(batch)
            struct.adapters = _address(adapters)
        return struct, adapters

    def _run_layers(self, batch: ctypes.Structure, first: int, last: int) -> None:
        self._functions.outrider_decoder_layers(
            *self._context, batch, self._keys, self._values, self._features, first, last
        )


def batch_struct(batch: InputBatch) -> ctypes.Structure:
    """Returns an OutriderBatch that points to the batch's memory; the caller must keep the batch alive.

    Its slots, paths and block tables are those of the first group of layers, which those of other groups follow.
    """
    arrays, struct = batch.arrays, structures.OutriderBatch()
    rows = arrays.token_ids, arrays.positions, arrays.slot_mapping
    sequences = arrays.query_start_loc, arrays.seq_lens, arrays.table_starts, arrays.block_tables, arrays.logits_rows
    addresses = [values.buffer_info()[0] for values in (*rows, *sequences)]
    trees = (_address(arrays.path_starts), _address(arrays.path_slots)) if batch.has_trees else (0, 0)
    sizes = len(arrays.token_ids), len(arrays.logits_rows), len(arrays.seq_lens), batch.block_size
    _BATCH.pack_into(struct, 0, *sizes, *addresses, *trees, 0, 0, 0)
    return struct


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
