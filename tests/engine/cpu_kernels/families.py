"""Small models of every family that the native decoder computes: settings of a config.json."""

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES = {
    "llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 40},
    "qwen2": {"head_dim": None, "tie_word_embeddings": True},  # with biases
    "qwen3": {"head_dim": 48, "num_attention_heads": 4},  # normalises queries and keys
    "ministral": {"sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"]},
    "seed_oss": {"attention_out_bias": True},  # with biases
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"partial_rotary_factor": 0.75, "head_dim": 32, "num_attention_heads": 4},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "sliding_window": 40,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None, "sliding_window": 40, "num_hidden_layers": 4},
    "gemma": {},
}
"""By model_type: settings that differ from SHAPE; None for those of transformers."""
