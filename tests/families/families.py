"""The families of models that tests compare with transformers, as small random checkpoints, and those refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

from checks.gemma import gemma_path
from outrider.model_hub.config import DEFAULT_MODEL_ID
from tests.model_hub.quantised import test_awq, test_fp8, test_gptq
from tests.model_hub.quantised.checkpoints import write_checkpoint
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import DEEPSEEK, EOS_TOKEN_ID, MERGES, SPECIAL_TOKENS, make_tiny_model, tiny_tokenizer

DECODER, BY_LAYERS = "native decoder", "by layers"
VOCAB_SIZE = 299
"""The number of entries of the tiny tokenizer: a larger model would have rows that transformers draws and we do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table: a configuration, and what becomes of it."""

    model_type: str  # transformers'; empty: the model that `load` names
    settings: Mapping[str, Any] = field(default_factory=dict)  # differences from tests.support.tiny_model
    load: Mapping[str, Any] = field(default_factory=dict)  # settings of the section `model`
    write: Callable[[Path, Mapping[str, Any]], Path] | None = None  # writes a quantised checkpoint, from a tiny model's
    kernels: str = DECODER  # on a CPU
    torch_computes: str = ""  # what torch computes, whose order of sums may depend on the batch
    refusal: str = ""  # the message's end; empty: it is served
    is_large: bool = False  # whether it is compared in full runs only

    @property
    def is_missing(self) -> bool:
        """Whether the model is a file that is not on this machine."""
        return self.load.get("id") == GEMMA_270M and not Path(GEMMA_270M).is_file()

    @property
    def is_quantised(self) -> bool:
        """Whether the checkpoint is quantised, so that transformers computes with dequantised weights."""
        return self.write is not None or self.load.get("id") == GEMMA_270M

    def make(self, path: Path) -> Path:
        """Writes a random checkpoint, in bfloat16 if it is not quantised, and returns its `model.id`."""
        about = {"architecture": self.model_type, "vocab_size": VOCAB_SIZE, "dtype": "bfloat16", "seed": 1}
        return (self.write or _write_plain)(path, {**about, "overrides": self.settings})

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded at load, so that transformers has no model of the same weights."""
        return "weights" in self.load


def _write_plain(path: Path, about: Mapping[str, Any]) -> Path:
    return make_tiny_model(path, **about)


def _write_gguf(kind: str, path: Path, about: Mapping[str, Any]) -> Path:
    """Writes matrices in the GGUF type `kind`."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(path / "plain", **about), dtype=torch.float32)
    tokens = sorted(tiny_tokenizer().get_vocab().items(), key=itemgetter(1))
    vocabulary = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [token for token, _ in tokens],
        "token_type": [3 if token in SPECIAL_TOKENS else 1 for token, _ in tokens],
        "merges": list(MERGES),
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
    }
    matrix_type = gguf.GGMLQuantizationType[kind]
    return write_gguf(
        model,
        path / "tiny.gguf",
        quantise=lambda _name, values: matrix_type if values.ndim == 2 else None,
        vocabulary=vocabulary,
    )


def of_gguf(model_type: str, kind: str, **settings: Any) -> Family:
    return Family(model_type=model_type, settings=settings, write=partial(_write_gguf, kind))


def of_writer(make_writer: Callable[[], Any], quantization: Mapping[str, Any]) -> Family:
    """Returns a Llama whose linear layers are quantised."""
    return Family(
        model_type="llama", write=lambda path, about: write_checkpoint(path, make_writer(), quantization, **about)
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 6.0],
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.3],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
TWO_OF_THREE = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 64, **TWO_OF_THREE}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FOUR_EXPERTS = {"num_local_experts": 4, "head_dim": 16, **EXPERTS}
ONE_OF_THREE = ["linear_attention", "full_attention", "linear_attention"]
HYBRID = {
    "layer_types": ONE_OF_THREE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16}


def native(model_type: str, **settings: Any) -> Family:
    return Family(model_type=model_type, settings=settings)


def by_layers(model_type: str, *, torch_computes: str = "", **settings: Any) -> Family:
    return Family(model_type=model_type, settings=settings, kernels=BY_LAYERS, torch_computes=torch_computes)


def refused(model_type: str, refusal: str, **settings: Any) -> Family:
    return Family(model_type=model_type, settings=settings, refusal=refusal)


OWN_ATTENTION = "does not compute attention through transformers' AttentionInterface, which paged attention replaces"
NO_ARGUMENTS = (
    "its layers do not pass a forward's arguments on to attention, through which paged attention finds the cache"
)

DEFAULT_NAME = "SmolLM2 135M, the default model"
DEFAULT = {"id": DEFAULT_MODEL_ID, "max_model_len": 1024}
GEMMA_270M = os.environ.get("OUTRIDER_GEMMA_GGUF") or str(gemma_path())
"""The path of Gemma 3 270M, which `make gemma` fetches. Its row is left out where it is not."""

FAMILIES: Mapping[str, Family] = {
    DEFAULT_NAME: Family(model_type="", load=DEFAULT),
    "Llama": native("llama"),
    "Llama 3 with biases": native(
        "llama", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "Mistral": native("mistral"),
    "Qwen 2": native("qwen2", tie_word_embeddings=True),
    "Qwen 3": native("qwen3", head_dim=32),
    "Gemma": native("gemma", head_dim=32),
    "Gemma 2": native("gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "Gemma 3": native("gemma3_text", **GEMMA),
    "Phi-3": native("phi3", sliding_window=20),
    "Phi-4-mini": native("phi3", rope_parameters=LONG, original_max_position_embeddings=512, tie_word_embeddings=True),
    "Granite": native(
        "granite", embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "OLMo 2": native("olmo2"),
    "OLMo 3": native("olmo3", **TWO_OF_THREE),
    "SmolLM3": native("smollm3", no_rope_layers=[1, 0, 1]),
    "GLM-4": by_layers("glm4", head_dim=32),
    "Cohere": by_layers("cohere"),
    "Cohere 2": by_layers("cohere2", **TWO_OF_THREE),
    "StarCoder2": by_layers("starcoder2", sliding_window=20),
    "Granite SWA": by_layers(
        "granite_swa", attention_multiplier=0.25, layer_rope_theta=[10000.0, 0.0, 5000.0], **TWO_OF_THREE
    ),
    "GPT-NeoX": by_layers("gpt_neox", rotary_pct=0.25),
    "GPT-2": by_layers("gpt2", torch_computes="Conv1D"),
    "Phi": by_layers("phi"),
    "Mixtral": by_layers("mixtral", **FOUR_EXPERTS),
    "Qwen 2 MoE": by_layers("qwen2_moe", num_experts=4, shared_expert_intermediate_size=40, **EXPERTS),
    "Qwen 3 MoE": by_layers("qwen3_moe", num_experts=4, head_dim=16, **EXPERTS),
    "OLMoE": by_layers("olmoe", num_experts=4, **EXPERTS),
    "GLM-4 MoE": by_layers("glm4_moe", n_routed_experts=8, n_group=4, topk_group=2, **SHARED, **EXPERTS),
    "gpt-oss": by_layers(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        intermediate_size=32,
        rope_parameters=YARN,
        **TWO_OF_THREE,
    ),
    "MiniCPM 3": by_layers("minicpm3"),
    "DeepSeek V2": by_layers("deepseek_v2"),
    "DeepSeek V3": by_layers(
        "deepseek_v3", q_lora_rank=None, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "Qwen 3 Next": by_layers(
        "qwen3_next", num_experts=4, shared_expert_intermediate_size=40, head_dim=32, **HYBRID, **EXPERTS
    ),
    "Qwen 3.5": by_layers("qwen3_5_text", head_dim=32, **HYBRID),
    "OLMo Hybrid": by_layers("olmo_hybrid", **HYBRID),
    "SmolLM2 135M, int8 at load": Family(model_type="", load={**DEFAULT, "weights": "int8"}, is_large=True),
    "SmolLM2 135M, int4 at load": Family(model_type="", load={**DEFAULT, "weights": "int4"}, is_large=True),
    "Gemma 3 270M, GGUF Q4_K_M": Family(model_type="", load={"id": GEMMA_270M, "max_model_len": 1024}, is_large=True),
    "Llama, int8 at load": Family(model_type="llama", load={"weights": "int8"}),
    "Mixtral, int8 at load": replace(by_layers("mixtral", **FOUR_EXPERTS), load={"weights": "int8"}),
    "Llama, GGUF Q8_0": of_gguf("llama", "Q8_0"),
    "Qwen 3, GGUF Q5_0": of_gguf("qwen3", "Q5_0", head_dim=32),
    "Gemma 3, GGUF Q4_0": of_gguf("gemma3_text", "Q4_0", **GEMMA),
    "Phi-3, GGUF Q4_1": of_gguf("phi3", "Q4_1", sliding_window=20),
    "StarCoder2, GGUF Q4_0": replace(of_gguf("starcoder2", "Q4_0", sliding_window=20), kernels=BY_LAYERS),
    "Llama, AWQ": of_writer(lambda: test_awq.Writer(32), {**test_awq.CONFIG, "group_size": 32}),
    "Llama, GPTQ": of_writer(test_gptq.Writer, test_gptq.CONFIG),
    "Llama, FP8": of_writer(lambda: test_fp8.Writer(test_fp8.blocks), test_fp8.CONFIG),
    "BLOOM": refused("bloom", OWN_ATTENTION),
    "CodeGen": refused("codegen", OWN_ATTENTION, rotary_dim=8),
    "DeepSeek V3.2": refused(
        "deepseek_v32",
        "has layers of type indexed_attention, which keep no plain K and V",
        **DEEPSEEK,
        index_head_dim=16,
    ),
    "Falcon": refused("falcon", OWN_ATTENTION),
    "Gemma 4": refused(
        "gemma4_text",
        "has layers of different K and V shapes [(4, 2, 16), (4, 2, 32)], which is not supported",
        head_dim=16,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "GPT": refused("openai-gpt", OWN_ATTENTION),
    "GPT-J": refused("gptj", OWN_ATTENTION, rotary_dim=8),
    "Mamba": refused("mamba", "has layers of type linear_attention, which keep no plain K and V", state_size=4),
    "MPT": refused("mpt", OWN_ATTENTION),
    "Nemotron": refused("nemotron", NO_ARGUMENTS),
    "StableLM": refused("stablelm", NO_ARGUMENTS),
    "XGLM": refused("xglm", OWN_ATTENTION, ffn_dim=32),
}
"""Every row by its name in docs/models.md, those that are served first."""
