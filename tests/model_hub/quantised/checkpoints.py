"""Writes a small random Llama whose linear layers are quantised, in the layouts that the formats' authors publish."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_model import make_tiny_model

Parts = Mapping[str, torch.Tensor]


def write_checkpoint(
    path: Path, quantise: Callable[[str, int, int], Parts], quantization: Mapping[str, Any], **about: Any
) -> Path:
    """Writes the checkpoint.

    Args:
        path: the directory.
        quantise: returns the parts, such as "qweight", of the linear layer of this name with these numbers of output
            features and inputs.
        quantization: the `quantization_config`.
        about: arguments of `make_tiny_model`.
    """
    make_tiny_model(path, **about)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        parts = quantise(module, *tensors.pop(name).shape)
        tensors |= {f"{module}.{part}": values.contiguous().clone() for part, values in parts.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": dict(quantization)}))
    return path


def pack_fields(values: np.ndarray, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Packs unsigned integers along the last axis: field i of a word, from the lowest bits, holds value order[i]."""
    fields = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // fields), np.uint32)
    for field, column in enumerate(order or range(fields)):
        words |= values[..., column::fields].astype(np.uint32) << np.uint32(bits * field)
    return torch.from_numpy(words.view(np.int32))


def random_scales(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns scales in float16, about as large as those of real weights."""
    return generator.uniform(0.001, 0.02, shape).astype(np.float16)


def expected_weight(codes: np.ndarray, zeros: np.ndarray | int, scales: np.ndarray) -> np.ndarray:
    """Returns scale · (code - zero) in float64: codes [out, in]; zeros and scales [out, num_groups]."""
    repeated = codes.shape[1] // scales.shape[1]
    zeros = np.repeat(np.broadcast_to(zeros, scales.shape), repeated, axis=1)
    return np.repeat(scales.astype(np.float64), repeated, axis=1) * (codes.astype(np.float64) - zeros)
