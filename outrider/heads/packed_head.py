"""Heads for native kernels, with everything that a proposer needs to know about them. Torch-free."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.decoder import Logits, NativeDecoder, NativeStep
from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.interface import address_of, layout_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.sampler import SampleRows
from outrider.engine.sampler.edits import Vocabulary
from outrider.engine.sampler.native_decider import NativeSampler, sampling_address
from outrider.errors import InternalError
from outrider.heads.spec import HeadSpec
from outrider.model_hub.packed_weights import Packed

_PATHS = layout_of(structures.OutriderPath)


@dataclass(frozen=True, slots=True, eq=False)
class PackedHead:
    """The result of `HeadModel.pack`, in this process's memory or mapped from a file."""

    spec: HeadSpec
    reduction: PackedReduction
    weights: DecoderWeights  # has a blob "target_ids" if the head's ids differ from the target's

    @property
    def target_ids(self) -> npt.NDArray[np.int64] | None:
        """[draft_vocab_size]: the target's token id of each logit; None if head and target have the same ids."""
        blob = self.weights.blobs.get("target_ids")
        return None if blob is None else blob.view(np.int64)

    def as_packed(self) -> Packed:
        """Returns the head in the form in which it is written to a file."""
        reduction = {field.name: getattr(self.reduction, field.name) for field in fields(FeatureSpec)}
        about = {"spec": asdict(self.spec), "shape": asdict(self.weights.shape), "reduction": reduction}
        return Packed(about, {**self.weights.blobs, **self.reduction.blobs})

    @classmethod
    def of_packed(cls, packed: Packed) -> PackedHead:
        about, shape = packed.about, DecoderShape.of_json(packed.about["shape"])
        reduction = {**about["reduction"], "taps": tuple(about["reduction"]["taps"])}
        return cls(
            HeadSpec(**about["spec"]),
            PackedReduction(**reduction, element_type=shape.element_type, blobs=packed.blobs),
            DecoderWeights(shape, packed.blobs),
        )


class HeadPath(NamedTuple):
    """A path after which a head drafts."""

    sample: SampleRows  # of the first token
    num_races: int  # 1: the winner of each position's race; n: also n - 1 runners-up
    max_tokens: int = 1  # 1 if the sample has a constraint: what follows depends on tokens that the kernels do not know
    reach: float = 1.0  # as in PathRows
    min_reach: float = 0.0
    block_ids: Sequence[int] = ()  # covers max_tokens - 1 rows after the forward's; not read if max_tokens is 1


class HeadDraft(NamedTuple):
    """The tokens that a head drafts after a path."""

    token_ids: list[tuple[int, ...]]  # of each token, the winner of the race and its runners-up
    confidences: list[float]
    states: list[Words]  # of each token, the head's own hidden state [width] from which it was decided


class NativeHeadSteps:
    """Drafts with a packed head over the head's own cache, made for the same kernels. Not thread-safe.

    A call is a rollout on a CPU: the kernels run forwards, and decide each token among the head's own ids. The race is
    run for each id, so the winner is the one among the target's ids with logits of -inf for those that the head lacks.
    """

    parallel_feature = None

    def __init__(
        self,
        head: PackedHead,
        kernels: CpuKernels,
        kv_cache: PagedKVCache,
        known_token_ids: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """`known_token_ids`: as for Sampler; None: all are known."""
        self._target_ids = head.target_ids
        self._vocab_size = head.spec.vocab_size
        self._width, self._dtype = head.reduction.width, WORDS[head.spec.dtype]
        self._step = NativeStep(NativeDecoder(kernels, head.weights), kv_cache)
        known = np.ones(self._vocab_size, dtype=np.bool_) if known_token_ids is None else known_token_ids
        self._sampler = NativeSampler(kernels, Vocabulary.of(np.asarray(known)), self._target_ids)
        self._drafts = structures.OutriderDrafts()
        self._num_tokens = array("q")
        self._make_room(1)

    def rows(self, values: Words) -> Words:
        """Returns features unchanged. Raises: InternalError if their width or dtype is not the head's."""
        if values.shape[1:] != (self._width,) or values.dtype != self._dtype:
            raise InternalError(f"features are {values.dtype} [{values.shape[1]}], not {self._dtype} [{self._width}]")
        return values

    def draft(
        self, batch: InputBatch, features: Words, paths: Sequence[HeadPath], *, wants_logits: bool = False
    ) -> tuple[list[HeadDraft], Logits | None]:
        """Computes one forward, drafts tokens after its rows with logits, and feeds them with the head's own states.

        A draft ends with a stop token, or if the product of its confidences is below `min_reach`.

        Args:
            batch: the rows, of which those with logits belong to `paths`, in order.
            features: [num_rows, width].
            paths: one for each row with logits.
            wants_logits: whether to return the logits of the first tokens.

        Returns:
            The drafts, and logits [len(paths), vocab_size], -inf for ids that the head does not draft.
        """
        num, drafts = len(paths), self._drafts
        max_tokens = drafts.max_tokens = max([path.max_tokens for path in paths], default=1)
        max_races = drafts.max_races = max([path.num_races for path in paths], default=1)
        self._make_room(num * max_tokens * max_races)
        kept = []  # memory to which the paths point
        for place, (sample, num_races, num_tokens, reach, min_reach, block_ids) in enumerate(paths):
            masks = None if sample.state.constraint is None else sample.masks()
            assumed = array("q", sample.assumed_token_ids)
            table = block_ids if isinstance(block_ids, array) else array("i", block_ids)
            kept.append((masks, assumed, table))
            known = sampling_address(sample.state), address_of(masks) or 0, *assumed.buffer_info(), sample.position
            wanted = num_races, num_tokens, reach, min_reach, table.buffer_info()[0]
            _PATHS.pack_into(self._paths, place * _PATHS.size, *known, *wanted)
        logits, ids = None, self._target_ids
        if wants_logits:
            logits = np.empty((num, self._vocab_size if ids is None else len(ids)), dtype=np.float32)
        drafts.logits = address_of(logits)
        self._step.draft(batch, features, self._sampler.handle, self._paths, drafts)
        if logits is not None and ids is not None:
            drafted, logits = logits, np.full((num, self._vocab_size), -math.inf, dtype=np.float32)
            logits[:, np.sort(ids)] = drafted
        found = []
        for place, path in enumerate(paths):
            first, races = place * max_tokens, path.num_races
            end = first + self._num_tokens[place]
            token_ids = [
                tuple(self._token_ids[at : at + races]) for at in range(first * max_races, end * max_races, max_races)
            ]
            states = self._states[first:end].tobytes()  # numpy's `copy` gives up Python's lock, and then waits for it
            own = list(np.frombuffer(states, dtype=self._dtype).reshape(-1, self._width))
            found.append(HeadDraft(token_ids, self._confidences[first:end].tolist(), own))
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
