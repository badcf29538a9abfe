"""FP8 weights (E4M3) with a scale for each block, each output feature or the whole matrix, dequantised to bfloat16.

E4M3 is not an integer format, so that the matrices take two bytes a weight in memory. How the checkpoint would quantise
activations (`activation_scheme`, stored scales of inputs) does not matter: they are not quantised to FP8 on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engine.arrays import to_bfloat16
from outrider.engine.kv_cache.array_plane import Words
from outrider.model_hub.quantised.scheme import Scheme
from outrider.model_hub.safetensors_files import SafetensorsFiles

_ROWS_AT_ONCE = 32  # so few that intermediate results fit the cache
SCALES = ("weight_scale_inv", "weight_scale")


def _e4m3() -> npt.NDArray[np.float32]:
    """Returns the value of each code: [256]. Exponents have a bias of 7; the largest code of each sign is NaN."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, codes & 7
    values = np.ldexp(np.where(exponents, 8 + fractions, fractions), np.maximum(exponents, 1) - 10)
    values[127::128] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3()


def scheme(quantization: Mapping[str, Any]) -> Scheme | str:
    """Returns how the weights of a checkpoint with this configuration are read, or why they cannot be."""
    if (experts := quantization.get("expert_dtype", "fp8")) != "fp8":
        return f"FP8 with experts in {experts} is not supported"
    block = quantization.get("weight_block_size")
    return Scheme(frozenset(SCALES), frozenset({"weight", *SCALES}), partial(read_fp8, block=block))


def read_fp8(files: SafetensorsFiles, module: str, *, block: tuple[int, int] | None) -> Words:
    """Returns weight · scale in bfloat16, computed in float32: [out_features, in_features].

    `block`: output features and inputs of a block, or None. Raises: KeyError if a part is missing, ValueError if the
    parts do not fit together.
    """
    if (kind := files.types[f"{module}.weight"]) != "F8_E4M3":
        raise ValueError(f"a weight of the type {kind}, not F8_E4M3")
    codes = files[f"{module}.weight"]
    scales = files.floats(next(name for part in SCALES if (name := f"{module}.{part}") in files))
    out_features, in_features = codes.shape
    if scales.size == 1:
        num_rows, scales = out_features, scales.reshape(1, 1)  # the rows that a row of scales applies to
    elif scales.shape in ((out_features,), (out_features, 1)):
        num_rows, scales = 1, scales.reshape(-1, 1)
    elif block and scales.shape == (-(-out_features // block[0]), -(-in_features // block[1])):
        num_rows, scales = block[0], np.repeat(scales, block[1], axis=1)[:, :in_features]
    else:
        raise ValueError(f"{codes.shape} weights, {scales.shape} scales, blocks of {block}")
    words = np.empty(codes.shape, np.uint16)
    for start in range(0, out_features, _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, out_features))
        words[rows] = to_bfloat16(_E4M3[codes[rows]] * scales[rows // num_rows])
    return words
