"""Drafts with a packed head: native kernels decide several tokens without the interpreter. Torch-free."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.decoder import Logits, NativeDecoder, NativeStep
from outrider.engine.cpu_kernels.interface import address_of, layout_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.sampler.edits import Vocabulary
from outrider.engine.sampler.native_decider import NativeSampler, sampling_address
from outrider.errors import InternalError
from outrider.heads.packed_head import PackedHead
from outrider.speculation.path_tree import DraftedToken
from outrider.speculation.proposers.draft_forward import PathRows, allowed_of, sample_rows

_PATHS = layout_of(structures.OutriderPath)


class NativeHeadSteps:
    """Drafts with a packed head over the head's own cache, made for the same kernels. Not thread-safe.

    A call is a rollout on a CPU: the kernels run forwards, and decide each token among the head's own ids. The race is
    run for each id, so the winner is the one among the target's ids with logits of -inf for those that the head lacks.
    """

    parallel_feature = None

    def __init__(
        self, head: PackedHead, kernels: CpuKernels, kv_cache: PagedKVCache, known_token_ids: npt.NDArray[np.bool_]
    ) -> None:
        """`known_token_ids`: as for Sampler."""
        self._target_ids = head.target_ids
        self._vocab_size = head.spec.vocab_size
        self._width, self._dtype = head.reduction.width, WORDS[head.spec.dtype]
        self._step = NativeStep(NativeDecoder(kernels, head.weights), kv_cache)
        self._sampler = NativeSampler(kernels, Vocabulary.of(np.asarray(known_token_ids)), self._target_ids)
        self._drafts = structures.OutriderDrafts()
        self._num_tokens = array("q")
        self._make_room(1)

    def rows(self, values: Words) -> Words:
        """Returns features unchanged. Raises: InternalError if their width or dtype is not the head's."""
        if values.shape[1:] != (self._width,) or values.dtype != self._dtype:
            raise InternalError(f"features are {values.dtype} [{values.shape[1]}], not {self._dtype} [{self._width}]")
        return values

    def draft(
        self, batch: InputBatch, features: Words, paths: Sequence[PathRows], *, wants_logits: bool = False
    ) -> tuple[list[DraftedToken], Logits | None]:
        """Computes one forward, drafts tokens after its rows with logits, and feeds them with the head's own states.

        A draft ends with a stop token, or if the product of its confidences is below `min_reach`. Drawn drafts and
        those of a constraint get one token a call: the first send its distribution, and the second need a mask for each
        token, which the compiled grammar makes from the tokens before it.

        Args:
            batch: the rows of one forward, of which those with logits belong to `paths`, in order.
            features: [num_rows, width].
            paths: those that get decisions.
            wants_logits: whether to return the logits of the first tokens.

        Returns:
            The decisions, and logits [len(paths), vocab_size], -inf for ids that the head does not draft.
        """
        drafts, samples = self._drafts, [sample_rows(path, 0) for path in paths]
        limits = [
            1 if path.wants_distribution or sample.state.constraint is not None else path.max_tokens
            for path, sample in zip(paths, samples, strict=True)
        ]
        max_tokens = drafts.max_tokens = max(limits, default=1)
        max_races = drafts.max_races = max([path.num_decisions for path in paths], default=1)
        self._make_room(len(paths) * max_tokens * max_races)
        kept = []  # memory to which the paths point
        for place, (path, sample, limit) in enumerate(zip(paths, samples, limits, strict=True)):
            masks = None if sample.state.constraint is None else sample.masks()
            assumed, table = array("q", sample.assumed_token_ids), path.block_ids
            table = table if isinstance(table, array) else array("i", table)
            kept.append((masks, assumed, table))
            known = sampling_address(sample.state), address_of(masks) or 0, *assumed.buffer_info(), sample.position
            wanted = path.num_decisions, limit, path.reach, path.min_reach, table.buffer_info()[0]
            _PATHS.pack_into(self._paths, place * _PATHS.size, *known, *wanted)
        logits, target_ids = None, self._target_ids
        if wants_logits:
            num_ids = self._vocab_size if target_ids is None else len(target_ids)
            logits = np.empty((len(paths), num_ids), dtype=np.float32)
        drafts.logits = address_of(logits)
        self._step.draft(batch, features, self._sampler.handle, self._paths, drafts)
        if logits is not None and target_ids is not None:
            drafted, logits = logits, np.full((len(paths), self._vocab_size), -math.inf, dtype=np.float32)
            logits[:, np.sort(target_ids)] = drafted
        found = []
        for place, (path, sample) in enumerate(zip(paths, samples, strict=True)):
            first = place * max_tokens
            end = first + self._num_tokens[place]
            starts = range(first * max_races, end * max_races, max_races)
            token_ids = [tuple(self._token_ids[start : start + path.num_decisions]) for start in starts]
            token_ids[0] = allowed_of(token_ids[0], sample)
            states = self._states[first:end].tobytes()  # numpy's `copy` gives up Python's lock, and then waits for it
            own = np.frombuffer(states, dtype=self._dtype).reshape(-1, self._width)
            decided, *following = (
                DraftedToken(ids, state=state, confidence=confidence)
                for ids, state, confidence in zip(token_ids, own, self._confidences[first:end], strict=True)
            )
            found.append(decided._replace(following=tuple(following)))
        return found, logits

    def _make_room(self, size: int) -> None:
        """Makes the arrays of paths and results larger, if necessary, for this many races of all paths together."""
        if size <= len(self._num_tokens):
            return
        self._paths = (structures.OutriderPath * size)()
        self._num_tokens, self._token_ids = array("q", bytes(8 * size)), array("q", bytes(8 * size))
        self._confidences, self._states = array("d", bytes(8 * size)), np.empty((size, self._width), dtype=self._dtype)
        for name in ("num_tokens", "token_ids", "confidences"):
            setattr(self._drafts, name, getattr(self, f"_{name}").buffer_info()[0])
        self._drafts.states = self._states.ctypes.data
