"""Packs a loaded transformers model, or a head, into the weights of a native decoder."""

from __future__ import annotations

from dataclasses import fields

from outrider.engine.cpu_kernels.decoder_weights import PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES, plain_linear
from outrider.engine.cpu_kernels.packing import DecoderPacking
from outrider.engine.feature_spec import FeatureSpec
from outrider.engine.features import FeatureReduction
from outrider.engine.kv_cache.tensor_planes import words_of


def pack_reduction(kernels: CpuKernels, reduction: FeatureSpec, element_type: ElementType) -> PackedReduction:
    """Packs a FeatureReduction. `element_type`: the model's type, to which taps and projection are rounded."""
    assert isinstance(reduction, FeatureReduction)
    packing = DecoderPacking(kernels)
    for name in ("tap_norms", "norm"):
        if (norm := getattr(reduction, name)) is not None:
            packing.add_norm(f"reduction.{name}", words_of(norm.float()))
    if reduction.projection is not None:
        (dtype,) = (dtype for dtype, element in ELEMENT_TYPES.items() if element is element_type)
        packing.add_matrix("reduction.projection", [plain_linear(reduction.projection.to(dtype), reduction.bias)])
    spec = {field.name: getattr(reduction, field.name) for field in fields(FeatureSpec)}
    return PackedReduction(**spec, element_type=element_type, blobs=packing.blobs)
