"""Converts the default model's GGUF file to a directory in transformers' layout, without torch.

The GGUF file, which is always the same, provides only tensors and vocabulary. Configuration, special tokens, sampling
settings and chat template are in the folder next to this file, as transformers writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.engine.arrays import to_bfloat16
from outrider.model_hub.checkpoint_text import read_json
from outrider.progress import Progress

_FILES = Path(__file__).with_name("smollm2-135m-instruct")
"""The folder with the other files. The sampling settings are those of the model card; the GGUF file has none."""
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
_CONTROL = 3
"""GGUF's number for the token type of special tokens."""


def convert_gguf(weights: Path, directory: Path, progress: Progress) -> None:
    """Writes configuration, tokenizer and bfloat16 safetensors.

    The model was trained and published in bfloat16. A Q4_1 weight, scale * q + minimum, may have more digits than
    bfloat16; the error of rounding it is far below the error of quantisation.
    """
    for path in _FILES.iterdir():
        shutil.copyfile(path, directory / path.name)  # without the mode, as an installation may be read-only
    reader = GGUFReader(weights)
    head_dim = read_json(directory / "config.json")["head_dim"]
    # One array has all tensors, so that its memory returns to the system. Separate arrays might leave theirs allocated.
    storage = np.empty(sum(int(tensor.n_elements) for tensor in reader.tensors), np.uint16)
    specs, end = {}, 0
    for index, tensor in enumerate(reader.tensors):
        progress("convert", index, len(reader.tensors))
        name = _name_in_transformers(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _pair_halves(values, head_dim)
        words = storage[end : end + values.size]
        words[:] = to_bfloat16(values).reshape(-1)
        end += values.size
        specs[name] = TensorSpec(
            dtype="bfloat16", shape=values.shape, data_ptr=words.ctypes.data, data_len=words.nbytes
        )
    serialize_file(specs, str(directory / "model.safetensors"), {"format": "pt"})
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    _tokenizer(fields).save(str(directory / "tokenizer.json"), pretty=False)
    progress("convert", len(reader.tensors), len(reader.tensors))


def _name_in_transformers(name: str) -> str:
    """Translates `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    *layer, module, part = name.split(".")
    return ".".join(("model", *(("layers", layer[1]) if layer else ()), _MODULES[module], part))


def _pair_halves(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Reorders rows of queries or keys [num_heads * head_dim, width].

    GGUF rotates pairs of neighbouring dimensions; transformers pairs each dimension with one of the head's other half.
    """
    width = weight.shape[1]
    return weight.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(-1, width)


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Makes a byte-level BPE tokenizer with separate digits, GGUF's "smollm" type."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    return tokenizer
