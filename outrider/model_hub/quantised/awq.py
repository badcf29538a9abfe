"""AWQ in AutoAWQ's "gemm" layout: 4-bit codes with scale and zero point of each group of inputs.

qweight [in_features, out_features / 8] and qzeros [num_groups, out_features / 8] are int32, whose nibbles, from the
lowest, hold the output features 0, 2, 4, 6, 1, 3, 5, 7 of eight. scales are [num_groups, out_features].
W = scale · (code - zero).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.model_hub.quantised.scheme import Codes, Scheme, exact_float16, grouped_weight
from outrider.model_hub.safetensors_files import SafetensorsFiles

_FEATURES = (0, 2, 4, 6, 1, 3, 5, 7)


def scheme(quantization: Mapping[str, Any]) -> Scheme | str:
    """Returns how the weights of a checkpoint with this configuration are read, or why they cannot be."""
    layout = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    if layout != "gemm":
        return f"AWQ in the layout {layout!r} is not supported, only 'gemm'"
    if (bits := quantization.get("bits", 4)) != 4:
        return f"AWQ of {bits} bits is not supported, only of 4"
    return Scheme(frozenset({"qweight"}), frozenset({"qweight", "qzeros", "scales"}), _read, bits=4)


def _read(files: SafetensorsFiles, module: str) -> GroupedWeight:
    scales = exact_float16(files, f"{module}.scales").T
    codes, zeros = _unpack(files[f"{module}.qweight"]), _unpack(files[f"{module}.qzeros"])
    return grouped_weight(codes, scales, zeros, bits=4)


def _unpack(words: npt.NDArray[Any]) -> Codes:
    """Unpacks int32 [n, k] and transposes them: [8k, n], from -8 to 7."""
    octets = np.ascontiguousarray(words.T).view(np.uint8).reshape(*words.T.shape, 4)
    codes = np.empty((len(octets), 8, len(words)), np.int8)
    for nibble, feature in enumerate(_FEATURES):
        octet = octets[:, :, nibble // 2]
        codes[:, feature] = octet >> 4 if nibble % 2 else octet & 15
    return np.subtract(codes, 8, out=codes).reshape(-1, len(words))
