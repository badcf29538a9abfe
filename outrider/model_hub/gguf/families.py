"""How llama.cpp's architectures differ from transformers' models: names of tensors and changes of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.errors import ModelError

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROTATION_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of llama.cpp that is read without transformers."""

    model_type: str  # in config.json
    architecture: str  # transformers' class
    modules: Mapping[str, str] = field(default_factory=dict)  # where they differ from `_MODULES`
    pairs_neighbours: bool = False
    """Whether rows of queries and keys are in the order in which rotations pair neighbours. transformers pairs each
    dimension with one of the head's other half."""
    norm_offset: float = 0.0  # what is added to the weights of norms


FAMILIES = {
    "llama": Family(model_type="llama", architecture="LlamaForCausalLM", pairs_neighbours=True),
    "smollm3": Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", pairs_neighbours=True),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "gemma": Family(model_type="gemma", architecture="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Family(model_type="gemma2", architecture="Gemma2ForCausalLM", modules=_FOUR_NORMS, norm_offset=1.0),
    "gemma3": Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", modules=_FOUR_NORMS, norm_offset=1.0),
    "phi3": Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}
"""Families by `general.architecture`."""


def name_in_transformers(name: str, family: Family) -> str:
    """Translates, for example, `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`.

    Raises: ModelError if the family has no such tensor.
    """
    *layer, module, part = name.split(".")
    found = family.modules.get(module) or _MODULES.get(module)
    if found is None or part not in ("weight", "bias") or (layer and (layer[0] != "blk" or len(layer) != 2)):
        raise ModelError(f"the GGUF tensor {name} is unknown: {family.architecture} has no such parameter")
    return ".".join((*(("model.layers", layer[1]) if layer else ()), found, part))
