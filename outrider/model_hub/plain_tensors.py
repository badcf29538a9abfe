"""Weights that are not quantised, as a mapping of arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.cpu_kernels.operators import ELEMENT_TYPES
from outrider.engine.cpu_kernels.packing import EMBEDDING, HEAD
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.kv_cache.tensor_planes import words_of
from outrider.errors import ModelError
from outrider.model_hub.fingerprint import weight_files
from outrider.model_hub.lazy_tensors import LazyTensors, Tensors
from outrider.model_hub.quantised.open import open_safetensors


def open_plain(directory: Path, *, is_tied: bool) -> Tensors:
    """Opens a checkpoint, which stays on disk until a tensor is used. Its files are safetensors, or torch's own.

    As in transformers, all names may lack their prefix, and a tied head that has the values of the embeddings is left
    out.

    Raises: ModelError if a file is missing or damaged.
    """
    files = weight_files(directory)
    tensors: Mapping[str, Any] = (
        open_safetensors(directory) if files[0].suffix == ".safetensors" else _words(_unpickled(files))
    )
    prefix = "" if any(name.startswith("model.") for name in tensors) else "model."
    names = {name if name.startswith("lm_head.") else prefix + name: name for name in tensors}
    if (
        is_tied
        and HEAD in names
        and EMBEDDING in names
        and np.array_equal(tensors[names[HEAD]], tensors[names[EMBEDDING]])
    ):
        del names[HEAD]
    return LazyTensors({name: partial(tensors.__getitem__, own) for name, own in names.items()})


def tensors_of(model: PreTrainedModel) -> Tensors:
    """Returns the weights of a model on the CPU, tied ones once. They share its memory."""
    return _words(
        {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    )


def _unpickled(files: list[Path]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for path in files:
        try:
            state |= torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except Exception as error:  # pickled files may raise anything
            raise ModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return state


def _words(state: Mapping[str, Tensor]) -> LazyTensors[Words]:
    def read(tensor: Tensor) -> Words:
        return words_of(tensor if tensor.dtype in ELEMENT_TYPES else tensor.float())

    return LazyTensors({name: partial(read, tensor) for name, tensor in state.items()})
