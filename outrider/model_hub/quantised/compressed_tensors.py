"""The formats of compressed-tensors (llm-compressor): integers of 4 or 8 bits, packed or not, and FP8.

Packed: weight_packed int32 [out_features, in_features · bits / 32], the lowest bits first, and weight_shape; else
weight, int8 or FP8. weight_scale is [out_features, num_groups], or one scale for all. Zero points, if any, are
weight_zero_point [out_features, num_groups], of packed weights packed along the first axis. W = scale · (code - zero).
How the checkpoint would quantise activations does not matter; see `fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.kv_cache.array_plane import Words
from outrider.model_hub.quantised.fp8 import read_fp8
from outrider.model_hub.quantised.scheme import Scheme, check_order, exact_float16, grouped_weight, unpack
from outrider.model_hub.safetensors_files import SafetensorsFiles

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = {("int", 4): ("group", "channel"), ("int", 8): ("group", "channel", "tensor")}
_STRATEGIES["float", 8] = ("block", "channel", "tensor")
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


def scheme(quantization: Mapping[str, Any]) -> Scheme | str:
    """Returns how the weights of a checkpoint with this configuration are read, or why they cannot be."""
    if (sparsity := (quantization.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        return f"compressed-tensors with sparsity ({sparsity}) is not supported"
    if quantization.get("transform_config"):
        return "compressed-tensors with transforms of activations (transform_config) is not supported"
    block, bits = None, 0
    for group in (quantization.get("config_groups") or {}).values():
        if not isinstance(group, Mapping) or not (weights := group.get("weights")):
            continue  # the name of a preset, or activations only
        layout = group.get("format") or quantization.get("format")
        if layout not in _FORMATS:
            return f"compressed-tensors in the format {layout!r} is not supported, only {', '.join(_FORMATS)}"
        kind = (weights.get("type", "int"), weights.get("num_bits", 8))
        if (strategy := weights.get("strategy")) not in _STRATEGIES.get(kind, ()):
            return f"compressed-tensors with {kind[0]} weights of {kind[1]} bits by {strategy} is not supported"
        if weights.get("actorder") in ("group", "dynamic", True):
            return "compressed-tensors with inputs ordered by activation (actorder group) is not supported"
        block = weights.get("block_structure") or block
        bits = max(bits, int(kind[1]) * (kind[0] == "int"))
    return Scheme(frozenset({"weight_scale"}), frozenset(_PARTS), partial(_read, block=block), bits)


def _read(files: SafetensorsFiles, module: str, *, block: tuple[int, int] | None) -> Words | GroupedWeight:
    zeros, bits = None, 8
    if (packed := f"{module}.weight_packed") in files:
        bits = files[packed].shape[1] * 32 // int(files[f"{module}.weight_shape"][1])
        if bits not in (4, 8):
            raise ValueError(f"codes of {bits} bits, not of 4 or 8")
        codes = unpack(files[packed], bits)
    elif files.types[f"{module}.weight"] == "I8":
        codes = files[f"{module}.weight"]
    else:
        return read_fp8(files, module, block=block)
    scales = exact_float16(files, f"{module}.weight_scale")
    if scales.size == 1:
        scales = np.broadcast_to(scales.reshape(()), len(codes))
    scales = scales.reshape(len(codes), -1)
    if (name := f"{module}.weight_zero_point") in files:
        zeros = unpack(files[name].T, bits).T if files.types[name] == "I32" else files[name].reshape(scales.shape)
    check_order(files, f"{module}.weight_g_idx", scales.shape[1])
    return grouped_weight(codes, scales, zeros, bits=bits)
