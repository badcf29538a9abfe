"""Decides tokens with the native kernels, in one call for all rows of a step."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import Masks
from outrider.engine.cpu_kernels.interface import address_of, layout_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import free_when_collected
from outrider.engine.sampler.edits import Vocabulary
from outrider.engine.sampler.filters import has_filters
from outrider.engine.sampler.sequence_sampling import SampleRows, SequenceSampling

# A call with fewer logits than this keeps Python's lock. Logits of rows with filters count _FILTERED_WEIGHT times, as
# they are read more often. A call of this size takes about half a millisecond. In the worst case, a top_k of tens of
# thousands, it should take less than the five milliseconds for which a thread may keep the lock (an estimate).
_SHORT_CALL = 1 << 20
_FILTERED_WEIGHT = 4
_ROWS = layout_of(structures.OutriderSampleRows)


class _Prepared:
    """One sample's parameters in the kernels' format. They are built once; `current` updates the counts in them."""

    def __init__(self, state: SequenceSampling) -> None:
        params, penalties = state.params, state.penalties
        self._penalties = penalties
        self._counted_ids: npt.NDArray[np.int64] | None = None
        self.has_penalties = penalties.counts is not None
        self._reads_counts = self.has_penalties or params.min_tokens > 0
        self.weight = _FILTERED_WEIGHT if has_filters(params) and not params.is_greedy else 1  # per logit
        self._sampling = structures.OutriderSampling(
            seed=params.seed,
            sample=state.sample,
            temperature=params.temperature,
            log_min_p=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            top_k=params.top_k,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            min_tokens=params.min_tokens,
            stop_ids=penalties.stop_ids.ctypes.data,
            num_stop_ids=len(penalties.stop_ids),
            bias_ids=penalties.bias_ids.ctypes.data,
            biases=penalties.biases.ctypes.data,
            num_biases=len(penalties.bias_ids),
            has_penalties=self.has_penalties,
            is_greedy=params.is_greedy,
        )
        self._address = ctypes.addressof(self._sampling)

    def current(self) -> int:
        """Returns the address of an OutriderSampling that includes everything committed so far that kernels read."""
        if not self._reads_counts:
            return self._address
        sampling = self._sampling
        sampling.num_generated = self._penalties.num_generated
        counts = self._penalties.counts
        if counts is not None:
            sampling.num_counted = len(counts)
            if counts.ids is not self._counted_ids:  # the array was replaced by a larger one
                self._counted_ids = counts.ids
                sampling.counted_ids = counts.ids.ctypes.data
                sampling.counts = counts.counts.ctypes.data
        return self._address


def _prepared(state: SequenceSampling) -> _Prepared:
    if state.prepared is None:
        state.prepared = _Prepared(state)
    assert isinstance(state.prepared, _Prepared)
    return state.prepared


def sampling_address(state: SequenceSampling) -> int:
    """Returns the address of an OutriderSampling with everything that `state` has committed. It is valid until then."""
    return _prepared(state).current()


class NativeSampler:
    """A sampler of the native kernels, with memory for a row per thread."""

    def __init__(
        self, kernels: CpuKernels, vocabulary: Vocabulary, target_ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        """`target_ids`: see outrider_sampler_create. Raises: MemoryError if there is no memory for a row per thread."""
        self._kernels = kernels  # kept, because the team must outlive the sampler
        functions = kernels.library.functions
        holes = np.ascontiguousarray(vocabulary.holes, dtype=np.int64)
        self.handle: int = functions.outrider_sampler_create(
            kernels.team,
            vocabulary.size,
            vocabulary.num_ids,
            holes.ctypes.data,
            len(holes),
            address_of(target_ids),
            0 if target_ids is None else len(target_ids),
        )
        if not self.handle:
            raise MemoryError(f"no memory for sampling from {vocabulary.size} token ids")
        free_when_collected(self, functions.outrider_sampler_free, self.handle)


class NativeDecider:
    """Decides with a team of threads; each row is decided by one thread."""

    def __init__(
        self, kernels: CpuKernels, vocabulary: Vocabulary, target_ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        """As for NativeSampler."""
        self._kernels = kernels
        self._sampler = NativeSampler(kernels, vocabulary, target_ids)
        self._rows = (structures.OutriderSampleRows * 1)()  # enlarged for the largest step so far

    def decide(self, logits: npt.NDArray[np.float32], rows: Sequence[SampleRows]) -> npt.NDArray[np.int64]:
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        num_rows, vocab_size = logits.shape
        if len(rows) > len(self._rows):
            self._rows = (structures.OutriderSampleRows * len(rows))()
        token_ids = np.empty(num_rows, dtype=np.int64)
        assumed = array("q")
        all_masks: list[Masks] = []  # kept alive during the call
        weight = 0
        for index, part in enumerate(rows):
            state, position, draft_token_ids, assumed_token_ids = part
            prepared, num = _prepared(state), 1 + len(draft_token_ids)
            mask_address = num_words = 0
            if state.constraint is not None and (masks := part.masks()) is not None:
                mask_address, num_words = masks.ctypes.data, masks.shape[1]
                all_masks.append(masks)
            fields = prepared.current(), mask_address, num_words, len(assumed), len(assumed_token_ids), num, position
            _ROWS.pack_into(self._rows, index * _ROWS.size, *fields)
            weight += num * prepared.weight
            if prepared.has_penalties:
                assumed.extend(assumed_token_ids)
                assumed.extend(draft_token_ids)
        library = self._kernels.library
        is_short = weight * vocab_size < _SHORT_CALL
        functions = library.functions_holding_lock if is_short else library.functions
        functions.outrider_sample(
            self._sampler.handle,
            logits.ctypes.data,
            vocab_size,
            self._rows,
            len(rows),
            assumed.buffer_info()[0],
            token_ids.ctypes.data,
        )
        return token_ids
