"""The weights of a whole decoder as the kernels read them: its sizes, and bytes by name. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from outrider.engine.cpu_kernels.library import ElementType, MatrixStruct

PACKED, BIAS, SCALES = "packed", "bias", "scales"
"""The last part of a blob's name, after that of its matrix."""

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Of config.json: the architectures in the shape of Llama."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes and constants of a decoder in the shape of Llama."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # multiplies query · key
    epsilon: float  # of the norms
    element_type: ElementType  # of activations, embedding, and weights that are not int8
    sliding_windows: tuple[int, ...]  # by layer; 0: none
    matrix_sizes: Mapping[str, tuple[int, int]]  # by name: (out_features, in_features)
    begins_normalised: bool = False  # of a drafter head, as what follows: see OutriderDecoder
    keeps_normalised: bool = False

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_json(cls, shape: Mapping[str, Any]) -> DecoderShape:
        """What `as_json` gave, from a file."""
        sizes = {name: tuple(sizes) for name, sizes in shape["matrix_sizes"].items()}
        types = {"element_type": ElementType(shape["element_type"]), "sliding_windows": tuple(shape["sliding_windows"])}
        return cls(**{**shape, **types, "matrix_sizes": sizes})


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """What `pack_decoder` makes of a model, in this process's memory or mapped from a file.

    Names: "cosines", "sines", "embedding" (where the output layer does not share it),
    "final_norm", "head.packed"; of layer 3, "3.input_norm", "3.post_attention_norm",
    "3.query_norm", "3.key_norm", and of its matrices qkv, output, gate_up and down
    "3.qkv.packed", "3.qkv.bias", "3.qkv.scales"; of a drafter head, "feature_norm" and
    "target_ids". What a model does not have is not there.
    """

    shape: DecoderShape
    blobs: Mapping[str, np.ndarray]  # each [num_bytes] uint8, aligned to 64 bytes or more

    @property
    def num_matrix_bytes(self) -> int:
        """What a forward of one row reads of them."""
        return sum(blob.nbytes for name, blob in self.blobs.items() if name.endswith(f".{PACKED}"))

    def address(self, name: str) -> int | None:
        """Of a blob; None where the model has none of that name."""
        blob = self.blobs.get(name)
        return None if blob is None else int(blob.ctypes.data)

    def matrix(self, name: str) -> MatrixStruct:
        """Points to blobs, which it does not keep alive."""
        scales = self.address(f"{name}.{SCALES}")
        return MatrixStruct(
            self.address(f"{name}.{PACKED}"),
            self.address(f"{name}.{BIAS}"),
            scales,
            *self.shape.matrix_sizes[name],
            self.shape.element_type if scales is None else ElementType.INT8,
        )
