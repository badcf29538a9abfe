"""Heads for native kernels, with everything that a proposer needs to know about them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.decoder import Logits, NativeDecoder, NativeStep
from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.errors import InternalError
from outrider.heads.spec import HeadSpec
from outrider.model_hub.packed_weights import Packed


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


class NativeHeadSteps:
    """Computes the forwards of a packed head over the head's own cache, made for the same kernels. Not thread-safe."""

    parallel_feature = None

    def __init__(self, head: PackedHead, kernels: CpuKernels, kv_cache: PagedKVCache) -> None:
        self.target_ids = head.target_ids
        self._vocab_size = head.spec.vocab_size
        self._width, self._dtype = head.reduction.width, WORDS[head.spec.dtype]
        self._step = NativeStep(NativeDecoder(kernels, head.weights), kv_cache)

    def rows(self, values: Words) -> Words:
        """Returns features unchanged. Raises: InternalError if their width or dtype is not the head's."""
        if values.shape[1:] != (self._width,) or values.dtype != self._dtype:
            raise InternalError(f"features are {values.dtype} [{values.shape[1]}], not {self._dtype} [{self._width}]")
        return values

    def forward(
        self, batch: InputBatch, features: Words, _depths: Sequence[int], _attended: InputBatch
    ) -> tuple[Words, Logits]:
        """Computes one forward as ModuleHeadSteps.forward does."""
        return self._step.draft(batch, features, self.target_ids, self._vocab_size)
