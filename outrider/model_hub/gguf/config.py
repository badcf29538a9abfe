"""A GGUF file's metadata as a config.json of transformers. Where a key is absent, llama.cpp's default applies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import ModelError
from outrider.model_hub.gguf.families import FAMILIES
from outrider.model_hub.gguf.header import BF16, F16, F32, GgufHeader

_DTYPES = {F32: "float32", F16: "float16", BF16: "bfloat16"}
_SPECIAL_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models with 27 billion weights, whose queries llama.cpp scales by the width."""
_GEMMA3_PERIOD = 6
_LOCAL_THETA = 10_000.0
_LLAMA3_WINDOWS = (8192, 4096, 16384, 32768)
"""Original windows that are tried to recover Llama 3's rotation from its factors."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Keys of metadata that no family here heeds, and the values for which that makes no difference."""

Factors = Mapping[str, npt.NDArray[np.float32]]
"""The tensors of `ROTATION_FACTORS` that a file has."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The metadata of one architecture."""

    header: GgufHeader
    factors: Factors

    @property
    def architecture(self) -> str:
        return str(self.header.metadata["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the architecture. Raises: ModelError if it is absent and there is no default."""
        value = self.header.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ModelError(f"the GGUF file has no {self.architecture}.{name}: convert the model again")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """Like `get`, for what may be stated for each layer. Raises: ModelError if layers differ."""
        value = self.get(name, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"the GGUF file's layers differ in {self.architecture}.{name}, which is not supported")
        return value[0]

    @property
    def head_dim(self) -> int:
        width, num_heads = self.get("embedding_length"), self.number("attention.head_count")
        return int(self.get("attention.key_length", width // num_heads))

    def has(self, *tensors: str) -> bool:
        return any(entry.name in tensors for entry in self.header.tensors)


def make_config(header: GgufHeader, factors: Factors) -> dict[str, Any]:
    """Returns the config.json of one of FAMILIES. Raises: ModelError if the metadata is incomplete or not supported."""
    metadata = _Metadata(header, factors)
    family = FAMILIES[metadata.architecture]
    if metadata.get("expert_count", 0):
        raise ModelError(
            f"the GGUF file is a mixture of experts of architecture {metadata.architecture}: not supported"
        )
    _check_values(metadata)
    shapes = {entry.name: entry.shape for entry in header.tensors}
    num_heads = metadata.number("attention.head_count")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": matrices_dtype(header),
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": metadata.get("embedding_length"),
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", num_heads),
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.get("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rotation(metadata),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    for name, key in _SPECIAL_IDS.items():
        config[name] = header.metadata.get(f"tokenizer.ggml.{key}")
    return config | _OWN_SETTINGS.get(metadata.architecture, lambda _: {})(metadata)


def _check_values(metadata: _Metadata) -> None:
    """Raises ModelError if the model has layers, or values that change its logits, which its family does not have."""
    layers = {entry.name.split(".")[1] for entry in metadata.header.tensors if entry.name.startswith("blk.")}
    if len(layers) != (stated := metadata.get("block_count")):
        raise ModelError(f"the GGUF file has {len(layers)} layers and states {stated}: it is incomplete")
    neutral = dict(_NEUTRAL)
    if metadata.architecture != "gemma2":
        neutral["attn_logit_softcapping"] = (0,)
    if metadata.architecture != "phi3":
        neutral["rope.dimension_count"] = (metadata.head_dim,)
    for name, values in neutral.items():
        if (value := metadata.get(name, values[0])) not in values:
            raise ModelError(
                f"the GGUF file has {metadata.architecture}.{name} = {value}, which is not supported: use the model's "
                "checkpoint in transformers' format"
            )


def matrices_dtype(header: GgufHeader) -> str:
    """Returns the type of most plain weights, or bfloat16 if matrices are quantised."""
    sizes: Counter[int] = Counter()
    for entry in header.tensors:
        sizes[entry.type] += entry.num_rows * entry.shape[-1]
    return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")


def _rotation(metadata: _Metadata) -> dict[str, Any]:
    theta = float(metadata.get("rope.freq_base", _LOCAL_THETA))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = metadata.get("rope.scaling.type", "linear")
    factor = float(metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 0.0))) or 1.0
    original = metadata.get("rope.scaling.original_context_length", metadata.get("context_length"))
    if kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if value := metadata.get(f"rope.scaling.yarn_{name}", 0):
                found[name] = value
    elif kind == "linear" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear") and (kind != "longrope" or "rope_factors_long.weight" not in metadata.factors):
        raise ModelError(f"the GGUF file's rotations are scaled by {kind!r}, which is not supported")
    if "rope_freqs.weight" in metadata.factors:
        found |= _llama3_rotation(metadata.factors["rope_freqs.weight"], theta)
    if "rope_factors_long.weight" in metadata.factors:
        found |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        for name in ("long", "short"):
            found[f"{name}_factor"] = metadata.factors[f"rope_factors_{name}.weight"].tolist()
        if attention := metadata.get("rope.scaling.attn_factor", 0):
            found["attention_factor"] = attention
    return found


def _llama3_rotation(divisors: npt.NDArray[np.float32], theta: float) -> dict[str, Any]:
    """Recovers the parameters of Llama 3's rotation from its frequencies' divisors [head_dim / 2].

    llama.cpp stores only the divisors. All published models blend between wavelengths of the original window and of a
    quarter of it. Raises: ModelError if these do not give the divisors.
    """
    factor = float(divisors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    for original in _LLAMA3_WINDOWS:
        smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
            rotation = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return rotation | {"rope_type": "llama3", "original_max_position_embeddings": original}
    raise ModelError("the GGUF file's rope_freqs are not those of Llama 3, and others are not supported")


def _llama(metadata: _Metadata) -> dict[str, Any]:
    names = ("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")
    return {name: metadata.has(tensor) for name, tensor in names}


def _gemma(metadata: _Metadata) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(metadata: _Metadata) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window", 4096)
    return _gemma(metadata) | {
        "query_pre_attn_scalar": _query_scalar(metadata),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
        "sliding_window": window,
        "layer_types": _layer_types([layer % 2 == 0 for layer in range(metadata.get("block_count"))]),
    }


def _gemma3(metadata: _Metadata) -> dict[str, Any]:
    num_layers = metadata.get("block_count")
    window = metadata.get("attention.sliding_window", 0)
    pattern = metadata.get("attention.sliding_window_pattern", _GEMMA3_PERIOD)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    local_theta = float(metadata.get("rope.freq_base_swa", _LOCAL_THETA))
    return _gemma(metadata) | {
        "query_pre_attn_scalar": _query_scalar(metadata),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": _layer_types([bool(slides and window) for slides in pattern[:num_layers]]),
        "rope_parameters": {
            "full_attention": _rotation(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


def _query_scalar(metadata: _Metadata) -> int:
    if metadata.get("block_count") == _LARGE_GEMMAS[metadata.architecture]:
        return int(metadata.get("embedding_length") // metadata.number("attention.head_count"))
    return metadata.head_dim


def _layer_types(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _phi3(metadata: _Metadata) -> dict[str, Any]:
    rotation = _rotation(metadata)
    rotation["partial_rotary_factor"] = metadata.get("rope.dimension_count", metadata.head_dim) / metadata.head_dim
    found: dict[str, Any] = {"rope_parameters": rotation, "sliding_window": None}
    if window := metadata.get("attention.sliding_window", 0):
        found["sliding_window"] = window
    if "original_max_position_embeddings" in rotation:
        found["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    return found


_OWN_SETTINGS: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
