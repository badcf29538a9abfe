"""From a GGUF file in the shape of Llama to a directory in transformers' layout, without torch.

`python -m outrider.model_hub.convert_gguf FILE DIRECTORY` prints a line of CONVERSION_STEPS as each is done. It runs in
its own process, because reading and dequantising GGUF takes memory that a node need not keep.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.engine.arrays import to_bfloat16
from outrider.errors import ModelError

CONVERSION_STEPS = ("weights", "tokenizer", "saved")

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3
"""The type that GGUF gives special tokens."""
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""As the default model's publisher shows it on its model card; the GGUF file says nothing."""


def convert_gguf(weights: Path, directory: Path) -> None:
    """Writes configuration, tokenizer and bfloat16 safetensors.

    bfloat16 is what the model was trained and published in. A Q4_1 weight, scale * q + minimum, may have more digits
    than that; what rounding takes is far below what quantising took. Raises ModelError for another architecture or
    tokenizer than the default model's.
    """
    reader = GGUFReader(weights)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    kinds = tuple(fields.get(name) for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kinds != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{weights} is {kinds}: only llama with the smollm tokenizer is converted")
    config = _config(fields, is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tensors: dict[str, npt.NDArray[np.uint16]] = {}
    for tensor in reader.tensors:
        name = _name_in_transformers(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _pair_halves(values, config["head_dim"])
        tensors[name] = np.ascontiguousarray(to_bfloat16(values))
    _report("weights")
    tokenizer = _tokenizer(fields)
    _report("tokenizer")
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=words.shape, data_ptr=words.ctypes.data, data_len=words.nbytes)
        for name, words in tensors.items()
    }
    serialize_file(specs, str(directory / "model.safetensors"), {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    special = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    names = {name.removesuffix("_id"): tokenizer.id_to_token(token_id) for name, token_id in special.items()}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {**special, **_SAMPLING})
    _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _report("saved")


def _config(fields: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """As transformers writes it for a Llama of these sizes."""
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_parameters": {"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _name_in_transformers(name: str) -> str:
    """Raises: ModelError for a tensor that a Llama does not have."""
    stem, _, part = name.rpartition(".")
    prefix, _, rest = stem.partition(".")
    if prefix == "blk":
        layer, _, own = rest.partition(".")
        if own in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[own]}.{part}"
    elif stem in _OTHER_TENSORS:
        return f"{_OTHER_TENSORS[stem]}.{part}"
    raise ModelError(f"the GGUF file has a tensor {name}, which is not known of a Llama")


def _pair_halves(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys [num_heads * head_dim, width]: GGUF rotates pairs of neighbours, transformers halves."""
    width = weight.shape[1]
    return weight.reshape(-1, head_dim // 2, 2, width).swapaxes(1, 2).reshape(-1, width)


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone, which is what "smollm" names."""
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


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _report(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
