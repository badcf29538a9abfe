"""Tiny random models with real tokenizers, written as ordinary checkpoints.

They load in a second, know every byte, and say nothing sensible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
MERGES = (
    *("t h", "th e", "i n", "a n", "n d", "e r", "o n", "r e", "a t", "e n", "o r", "i s", "e s", "i t", "o u"),
    *("Ġ t", "Ġt h", "Ġth e", "Ġ a", "Ġ s", "Ġ w", "Ġ o", "Ġ c", "Ġ i", "Ġo f", "Ġ p", "in g", "Ġa nd", "Ġ in"),
    *("Ġt o", "e d", "Ġ b", "Ġ m", "Ġ f", "l l", "r o", "Ġ d", "Ġ h", "a l", "s t"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {
    **LATENT_ATTENTION,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 32},
    "minicpm3": LATENT_ATTENTION,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
}
"""Differences from the common shape, by transformers' model_type."""


def make_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    vocab_size: int = 320,
    dtype: str = "float32",
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a random decoder of about 100,000 weights to `path` and returns it.

    `architecture` is a model_type of transformers; `vocab_size` is the number of the model's
    rows, at least the tokenizer's, the rest being padding; `dtype` is that of the stored
    weights; `overrides` go into the configuration. Equal arguments give equal weights and
    tokenizers. Raises ValueError for an unknown architecture or a vocabulary that is too small.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    if vocab_size < tokenizer.get_vocab_size():
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {tokenizer.get_vocab_size()}")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # logits are far from uniform, so that the best token is clear
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
        **ARCHITECTURES.get(architecture, {}),
        **(overrides or {}),
    }
    config = AutoConfig.for_model(architecture, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases: ones or zeros would hide mistakes
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    path.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": settings["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def tiny_tokenizer() -> Any:
    """Returns a byte-level BPE `tokenizers.Tokenizer`: special tokens, 256 bytes, and the merges above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = dict.fromkeys([*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)])
    tokenizer = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
