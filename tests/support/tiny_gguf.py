"""Writes a transformers model as a GGUF file as llama.cpp's converter does, with names from the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.matrices import to_float32
from outrider.model_hub.gguf.directory import find_files, gguf_directory, open_directory
from outrider.model_hub.lazy_tensors import Tensors

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""llama.cpp's names of architectures by transformers' model_type, where they differ."""

BYTES = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [*(chr(0x100 + index) for index in range(33)), *map(chr, range(33, 127)), "<|end|>"],
    "token_type": [*(1 for _ in range(33 + 94)), 3],
    "merges": [],
    "bos_token_id": 0,
    "eos_token_id": 127,
}
"""A vocabulary of ASCII characters, as values of "tokenizer.ggml"."""


class GgufModel(NamedTuple):
    """A GGUF model that is open."""

    directory: Path
    files: list[Path]
    tensors: Tensors


def open_gguf(path: Path, cache: Path) -> GgufModel:
    directory = gguf_directory(path, cache)
    return GgufModel(directory, find_files(path), open_directory(directory)[0])


def float_values(tensor: Any) -> np.ndarray:
    return tensor.dequantise() if isinstance(tensor, GroupedWeight) else to_float32(tensor)


def write_gguf(
    model: Any,
    path: Path,
    *,
    quantise: Callable[[str, np.ndarray], gguf.GGMLQuantizationType | None] = lambda _name, _values: None,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes `model` (a causal language model in float32) and returns the first file.

    `quantise` chooses a tensor's type by its name and values, None for F32. `metadata`: further values of the
    architecture. `vocabulary`: values of "tokenizer.ggml"; BYTES without it. `values`: further metadata by
    its whole name.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    add_values(writer, name, {**_rotation(config, head_dim), **_own_values(config), **(metadata or {})})
    add_values(writer, "tokenizer.ggml", vocabulary or BYTES)
    add_values(writer, "", values or {})
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for parameter, tensor in {**_factors(config, head_dim), **_state(model)}.items():
        values = np.asarray(tensor, np.float32)
        if name in ("llama", "smollm3") and parameter.endswith(
            ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
        ):
            values = _neighbours(values, head_dim)
        if name.startswith("gemma") and parameter.endswith("norm.weight"):
            values = values + np.float32(1.0)
        stored = names.get_name(parameter, try_suffixes=(".weight", ".bias")) or parameter
        kind = quantise(stored, values)
        if kind is None:
            writer.add_tensor(stored, np.ascontiguousarray(values))
        else:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def add_values(writer: gguf.GGUFWriter, group: str, values: Mapping[str, Any]) -> None:
    """Adds metadata; the type follows from each value's."""
    adds = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
    for key, value in values.items():
        adds.get(type(value), writer.add_uint32)(f"{group}.{key}".lstrip("."), value)


def _state(model: Any) -> dict[str, Any]:
    state = {name: parameter.detach().numpy() for name, parameter in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _neighbours(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of queries or keys, so that the dimensions of a rotated pair are neighbours."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _own_values(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attention.sliding_window", "sliding_window"),
    ):
        if (value := getattr(config, name, None)) and config.model_type not in ("qwen2", "qwen3"):
            found[key] = value
    return found


def _rotation(config: Any, head_dim: int) -> dict[str, Any]:
    rotation = config.rope_parameters
    rotation = rotation.get("full_attention", rotation)
    found: dict[str, Any] = {"rope.freq_base": float(rotation["rope_theta"])}
    found["rope.dimension_count"] = int(head_dim * rotation.get("partial_rotary_factor", 1.0))
    if rotation["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rotation["rope_type"], "rope.scaling.factor": float(rotation["factor"])}
    if "original_max_position_embeddings" in rotation and rotation["rope_type"] != "llama3":
        found["rope.scaling.original_context_length"] = rotation["original_max_position_embeddings"]
    return found


def _factors(config: Any, head_dim: int) -> dict[str, np.ndarray]:
    """Returns the tensors of rotations that llama.cpp does not compute from metadata."""
    rotation = config.rope_parameters
    if rotation.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": np.array(rotation[f"{name}_factor"]) for name in ("long", "short")}
    if rotation.get("rope_type") != "llama3":
        return {}
    factors = []
    for frequency in rotation["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength, original = 2 * np.pi / frequency, rotation["original_max_position_embeddings"]
        low, high = rotation["low_freq_factor"], rotation["high_freq_factor"]
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rotation["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rotation["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors)}
