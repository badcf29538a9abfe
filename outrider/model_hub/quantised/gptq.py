"""GPTQ as AutoGPTQ and GPTQModel write it: codes of 4 or 8 bits with scale and zero point of each group of inputs.

qweight [in_features · bits / 32, out_features] and qzeros [num_groups, out_features · bits / 32] are int32, the lowest
bits first. scales are [num_groups, out_features]. W = scale · (code - zero). The first version of the format, "gptq",
stores each word of zeros decremented by one in each of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.model_hub.quantised.scheme import Scheme, check_order, exact_float16, grouped_weight, unpack
from outrider.model_hub.safetensors_files import SafetensorsFiles

_VERSIONS = ("gptq", "gptq_v2")
_BITS = (4, 8)
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""1 in each field of a word, by the fields' number of bits."""


def scheme(quantization: Mapping[str, Any]) -> Scheme | str:
    """Returns how the weights of a checkpoint with this configuration are read, or why they cannot be."""
    version = str(quantization.get("checkpoint_format") or quantization.get("format") or _VERSIONS[0]).lower()
    if version not in _VERSIONS:
        return f"GPTQ in the format {version!r} is not supported, only {' and '.join(map(repr, _VERSIONS))}"
    if (bits := quantization.get("bits")) not in _BITS:
        return f"GPTQ of {bits} bits is not supported, only of 4 and 8"
    if quantization.get("desc_act") and quantization.get("group_size") != -1:
        return "GPTQ with inputs ordered by activation (desc_act) is not supported"
    read = partial(_read, is_decremented=version == _VERSIONS[0])
    return Scheme(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales", "g_idx"}), read, bits=bits)


def _read(files: SafetensorsFiles, module: str, *, is_decremented: bool) -> GroupedWeight:
    scales, qzeros = exact_float16(files, f"{module}.scales").T, files[f"{module}.qzeros"]
    bits = qzeros.shape[1] * 32 // len(scales)  # GPTQModel's option `dynamic` sets them for each module
    if bits not in _BITS:
        raise ValueError(f"codes of {bits} bits, not of 4 or 8")
    check_order(files, f"{module}.g_idx", scales.shape[1])
    if is_decremented:
        qzeros = qzeros.view(np.uint32) + _ONES[bits]
    codes, zeros = unpack(files[f"{module}.qweight"].T, bits), unpack(qzeros, bits).T
    return grouped_weight(codes, scales, zeros, bits=bits)
