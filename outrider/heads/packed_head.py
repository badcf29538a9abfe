"""Heads for native kernels, with everything that a proposer needs to know about them. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights, PackedReduction
from outrider.engine.feature_spec import FeatureSpec
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
