"""Converts the default model's GGUF file to a directory in transformers' layout, without torch.

The GGUF file, which is always the same, provides only tensors and vocabulary. Configuration, special tokens, sampling
settings and chat template are in the folder next to this file, as transformers writes them.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
from safetensors import TensorSpec, serialize_file

from outrider.engine.arrays import to_bfloat16
from outrider.engine.cpu_kernels.matrices import to_float32
from outrider.model_hub.checkpoint_text import TOKENIZER_FILE, read_json
from outrider.model_hub.gguf.header import read_header
from outrider.model_hub.gguf.tensors import open_tensors
from outrider.model_hub.gguf.tokenizer import GgufVocabulary
from outrider.model_hub.lazy_tensors import dequantised
from outrider.progress import Progress

_FILES = Path(__file__).with_name("smollm2-135m-instruct")
"""The folder with the other files. The sampling settings are those of the model card; the GGUF file has none."""


def convert_gguf(weights: Path, directory: Path, progress: Progress) -> None:
    """Writes configuration, tokenizer and bfloat16 safetensors.

    The model was trained and published in bfloat16. A Q4_1 weight, scale * q + minimum, may have more digits than
    bfloat16; the error of rounding it is far below the error of quantisation.
    """
    for path in _FILES.iterdir():
        shutil.copyfile(path, directory / path.name)  # without the mode, as an installation may be read-only
    header = read_header(weights)
    head_dim = read_json(directory / "config.json")["head_dim"]
    tensors = dequantised(open_tensors([weights], header.tensors, "llama", head_dim))
    # One array has all tensors, so that its memory returns to the system. Separate arrays might leave theirs allocated.
    storage = np.empty(sum(math.prod(entry.shape) for entry in header.tensors), np.uint16)
    specs, end = {}, 0
    for index, (name, tensor) in enumerate(tensors.items()):
        progress("convert", index, len(tensors))
        values = to_float32(tensor)
        words = storage[end : end + values.size]
        words[:] = to_bfloat16(values).reshape(-1)
        end += values.size
        specs[name] = TensorSpec(
            dtype="bfloat16", shape=values.shape, data_ptr=words.ctypes.data, data_len=words.nbytes
        )
    serialize_file(specs, str(directory / "model.safetensors"), {"format": "pt"})
    GgufVocabulary.of(header.metadata).make_tokenizer().save(str(directory / TOKENIZER_FILE), pretty=False)
    progress("convert", len(tensors), len(tensors))
