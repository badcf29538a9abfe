"""The families of models that the native decoder computes, and the options of one model by its config.json. Torch-free.

A family is an entry of FAMILIES: how it differs from Llama. Biases, and norms of queries and keys, are used where the
checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.cpu_kernels.decoder_weights import DecoderShape
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.model_spec import ModelSpec, windows_of
from outrider.engine.scaled_rotations import Rotation, make_rotation, rope_parameters
from outrider.errors import ModelError

WIDTH_STEP = 32
"""Widths of activations must be multiples of this number, so that rows need no padding on any instruction path."""
HEAD_DIM_STEP = 16
"""The dimension of a head must be a multiple of this number."""

_OF_HEADS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
LLAMA_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", **_OF_HEADS}
"""Names of a layer's norms in transformers, by their names in OutriderLayer."""
_OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
    **_OF_HEADS,
}
_FOUR_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_OUTPUT_NORMS}

_ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True, "gelu_new": True}
"""Supported activations; whether they are the tanh approximation of GELU."""
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_COMMON: dict[str, Any] = {
    **dict.fromkeys((*_REQUIRED, "num_key_value_heads", "head_dim", "architectures")),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")),
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Settings in config.json that all families heed, and their defaults."""
_WINDOWS = {"sliding_window": None, "layer_types": None}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models differs from Llama."""

    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    norm_offset: float = 0.0  # added to the weights of norms, in float32
    rounds_norms_once: bool = False  # see outrider_rms_norm
    norms_all_heads: bool = False  # whether norms of queries and keys are of all heads as one vector
    scales_embedding: bool = False  # whether embeddings are multiplied by the root of their width
    rotates_partly: bool = False  # whether it heeds partial_rotary_factor
    full_every: int = 0  # every n-th layer has no window; 0: all layers have one
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings in config.json that only some families heed, or whose defaults differ."""


_QWEN = Family(settings={**_WINDOWS, "use_sliding_window": False, "max_window_layers": 28})
_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
_GEMMA2 = {**_GEMMA, **_WINDOWS, "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": None}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(settings={"sliding_window": 4096}),
    "ministral": Family(settings={**_WINDOWS, "sliding_window": 4096}),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "smollm3": Family(
        settings={
            **_QWEN.settings,
            "max_window_layers": 0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        }
    ),
    "seed_oss": Family(settings={"head_dim": 128}),
    "phi3": Family(rotates_partly=True, settings={"sliding_window": None, "rms_norm_eps": 1e-5}),
    "granite": Family(
        settings=dict.fromkeys(
            ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        )
    ),
    "gemma": Family(norm_offset=1.0, rounds_norms_once=True, scales_embedding=True, settings=_GEMMA),
    "gemma2": Family(
        norms=_FOUR_NORMS,
        norm_offset=1.0,
        rounds_norms_once=True,
        scales_embedding=True,
        full_every=2,
        settings={**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        norms=_FOUR_NORMS,
        norm_offset=1.0,
        rounds_norms_once=True,
        scales_embedding=True,
        full_every=6,
        settings={
            **_GEMMA2,
            "final_logit_softcapping": None,
            "sliding_window_pattern": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
    "olmo2": Family(norms=_OUTPUT_NORMS, rounds_norms_once=True, norms_all_heads=True),
    "olmo3": Family(
        norms=_OUTPUT_NORMS,
        rounds_norms_once=True,
        norms_all_heads=True,
        full_every=4,
        settings={**_WINDOWS, "sliding_window": 4096, "rope_theta": 500_000.0, "rope_local_base_freq": None},
    ),
}
"""Families by `model_type` in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderOptions:
    """One model's options, without its weights."""

    family: Family
    architecture: str  # class name in transformers, such as "LlamaForCausalLM"
    vocab_size: int
    is_tied: bool  # whether the embedding is also the output layer
    rotations: tuple[Rotation, ...]
    shape: DecoderShape  # element_type and matrix_sizes are those of no weights

    def spec(self, *, dtype: str, max_model_len: int, is_extended: bool = False) -> ModelSpec:
        """Returns the model's sizes. For the arguments see ModelSpec."""
        shape = self.shape
        return ModelSpec(
            architecture=self.architecture,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            is_extended=is_extended,
            windows=windows_of(shape.sliding_windows, max_model_len),
        )


def decoder_options(config: Mapping[str, Any]) -> DecoderOptions | str:
    """Returns the options by a config.json (of any version of transformers), or why the decoder cannot compute it.

    Rotations that depend on a text's length are those within the original window, unless `window.fix_rotations` has
    changed them in `config`.
    """
    try:
        return _options(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"its config.json is unusual ({type(error).__name__}: {error})"


def _options(config: Mapping[str, Any]) -> DecoderOptions | str:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return f"{config.get('model_type')} is none of the native decoder's families"
    settings = {name: config.get(name, default) for name, default in {**_COMMON, **family.settings}.items()}
    if missing := [name for name in _REQUIRED if settings[name] is None]:
        return f"its config.json has no {missing[0]}"
    activation = settings.get("hidden_activation") or settings["hidden_act"]
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    if settings.get("use_bidirectional_attention"):
        return "it attends in two directions"
    rotated = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1) and not family.rotates_partly:
        return "its partial_rotary_factor is one that its family ignores"
    hidden, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    head_dim = settings["head_dim"] or hidden // num_heads
    if head_dim % HEAD_DIM_STEP:
        return f"its heads have {head_dim} dimensions, not a multiple of {HEAD_DIM_STEP}"
    widths = (hidden, settings["intermediate_size"], num_heads * head_dim)
    if any(width % WIDTH_STEP for width in widths):
        return f"its widths {widths} are not multiples of {WIDTH_STEP}"
    types = settings.get("layer_types") or ()
    if types and (len(types) != settings["num_hidden_layers"] or not {_FULL, _SLIDING}.issuperset(types)):
        return f"its layer_types {types} are not one of {_FULL} and {_SLIDING} for each layer"
    windows = _windows(settings, family)
    try:
        rotations, of_layers = _rotations(settings, head_dim, windows)
    except ModelError as error:
        return str(error)
    rotary_dims = {2 * len(rotation.frequencies) for rotation in rotations}
    if len(rotary_dims) != 1:
        return f"its layers rotate different numbers of dimensions {sorted(rotary_dims)}"
    shape = DecoderShape(
        num_layers=settings["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=settings["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=settings["num_key_value_heads"] or num_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dims.pop(),
        scaling=settings.get("attention_multiplier") or (settings.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        epsilon=settings["rms_norm_eps"],
        attention_softcap=settings.get("attn_logit_softcapping") or 0.0,
        logits_softcap=settings.get("final_logit_softcapping") or 0.0,
        logits_scale=1.0 / (settings.get("logits_scaling") or 1.0),
        embedding_scale=hidden**0.5 if family.scales_embedding else settings.get("embedding_multiplier", 1.0),
        residual_scale=settings.get("residual_multiplier", 1.0),
        is_gelu=_ACTIVATIONS[activation],
        rounds_norms_once=family.rounds_norms_once,
        norms_all_heads=family.norms_all_heads,
        element_type=ElementType.FLOAT32,
        sliding_windows=windows,
        rotations=of_layers,
        matrix_sizes={},
    )
    return DecoderOptions(
        family=family,
        architecture=str((settings["architectures"] or [config["model_type"]])[0]),
        vocab_size=settings["vocab_size"],
        is_tied=bool(settings["tie_word_embeddings"]),
        rotations=rotations,
        shape=shape,
    )


def _windows(settings: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Returns each layer's window; 0: none."""
    window, num_layers = settings.get("sliding_window") or 0, settings["num_hidden_layers"]
    if not settings.get("use_sliding_window", True):
        window = 0
    if types := settings.get("layer_types"):
        return tuple(window * (each == _SLIDING) for each in types)
    full_every = settings.get("sliding_window_pattern") or family.full_every or num_layers + 1
    first = settings.get("max_window_layers", 0)
    return tuple(window * (layer >= first and (layer + 1) % full_every != 0) for layer in range(num_layers))


def _rotations(
    settings: Mapping[str, Any], head_dim: int, windows: tuple[int, ...]
) -> tuple[tuple[Rotation, ...], tuple[int, ...]]:
    """Returns the rotations, and for each layer the number of its rotation; -1: none. Raises: ModelError if one is not
    supported.
    """
    parameters = rope_parameters(settings)
    if "rope_theta" in parameters:
        rotations: tuple[Rotation, ...] = (make_rotation(parameters, head_dim),)
        numbers = [0] * len(windows)
    else:
        kinds = settings.get("layer_types") or [_SLIDING if window else _FULL for window in windows]
        used = sorted(set(kinds))
        if missing := set(used) - parameters.keys():
            raise ModelError(f"its config.json has no rotation for {', '.join(missing)}")
        rotations = tuple(make_rotation(parameters[kind], head_dim, kind) for kind in used)
        numbers = [used.index(kind) for kind in kinds]
    if "no_rope_layers" in settings:
        interval = settings["no_rope_layer_interval"]
        rotates = settings["no_rope_layers"] or [(layer + 1) % interval for layer in range(len(windows))]
        numbers = [number if each else -1 for number, each in zip(numbers, rotates, strict=True)]
    return rotations, tuple(numbers)
