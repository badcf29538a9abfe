"""Facts that put the figures in context: the processor, its instructions and load, and its speed of reading weights."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reference import read_bandwidth
from safetensors import safe_open

from outrider.bench.machine import describe_machine
from outrider.engine.cpu_kernels.paths import processor_flags
from outrider.model_hub.gguf.header import read_header

TELLING_FLAGS = ("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Without scales."""


def machine_facts() -> dict[str, Any]:
    flags = processor_flags()
    return {
        **asdict(describe_machine()),
        "cpu_flags": [flag for flag in TELLING_FLAGS if flag in flags],
        "load_average": os.getloadavg(),
        "transparent_huge_pages": HUGE_PAGES.read_text(encoding="utf-8").strip() if HUGE_PAGES.exists() else "",
    }


def count_weights(model: Path) -> int:
    """Returns the number of weights in a GGUF file, or in a directory's model.safetensors.

    A tied embedding is stored, and read, once.
    """
    if model.is_file():
        return sum(math.prod(tensor.shape) for tensor in read_header(model).tensors)
    with safe_open(model / "model.safetensors", framework="np") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 no mapping


def measure_floor(num_weights: int, *, num_threads: int) -> Mapping[str, float]:
    """Returns the memory bandwidth and, by dtype, tokens per second if a token took only the time to read weights."""
    bandwidth = read_bandwidth(num_threads)
    floors = {dtype: bandwidth / (num_weights * size) for dtype, size in BYTES_PER_WEIGHT.items()}
    return {"bandwidth_bytes_per_second": bandwidth, **floors}
