"""Writes the golden files of MTP: python -m tests.heads.make_golden_mtp {transformers,speculators}

The logits are computed by the owners' code:
- `transformers`, in this project's environment: MtpModel with a whole target: Glm4Moe, and DeepSeek-V3 with latent
  attention.
- `speculators` 0.9.0, in an environment of its own with the transformers that it requires: MTPDraftModel with Qwen3,
  and with Qwen3.5 for gated attention and norms of 1 + weight.
A Qwen3.5 target cannot be served, because most of its layers keep no keys and values. Its head is included for the
layout of Qwen's own checkpoints.
"""

from __future__ import annotations

import sys

import torch

from tests.heads import golden_files

HIDDEN, VOCAB, COMMITTED, DRAFTED = 32, 48, 9, 3
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
}


def shake(module, scale=0.3):
    """Sets random weights, since ones and zeros could hide mistakes."""
    biases = [each for name, each in module.named_buffers() if name.endswith("correction_bias")]
    for parameter in [*module.parameters(), *biases]:
        torch.nn.init.normal_(parameter, mean=0.6 if parameter.ndim == 1 else 0.0, std=scale)
    return module


def text():
    return torch.randint(0, VOCAB, (COMMITTED + DRAFTED,)), torch.randn(COMMITTED - 1, HIDDEN)


GLM = {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


def with_target(name, model_type, **settings):
    """Writes a head with experts in its target's checkpoint. Shared tensors are copied."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.modeling_layers import MtpModel

    config = AutoConfig.for_model(
        model_type,
        **SIZES
        | {
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "attn_implementation": "eager",
        }
        | settings,
    )
    target = shake(AutoModelForCausalLM.from_config(config).float().eval())
    model = shake(MtpModel(target, 1).float().eval())
    token_ids, hidden = text()
    cache = DynamicCache(config=config.get_mtp_config())
    positions = torch.arange(COMMITTED + DRAFTED)

    def step(state, tokens, places):
        return model.forward_layer(0, state[None], places[None], cache, input_ids=tokens[None])[0]

    state = step(hidden, token_ids[1:COMMITTED], positions[: COMMITTED - 1])[-1:]
    logits = [target.lm_head(state[0])]
    for place in range(COMMITTED, COMMITTED + DRAFTED):
        state = step(state, token_ids[place : place + 1], positions[place - 1 : place])
        logits.append(target.lm_head(state[0]))
    prefix, tensors = "model.layers.2.", {}
    for key, value in model.layers[0].state_dict().items():
        short = key.removeprefix("mtp_block.").replace("post_norm.weight", "shared_head.norm.weight")
        if short == "mlp.experts.gate_up_proj":
            for expert, (gate, up) in enumerate(each.chunk(2) for each in value):
                tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif short == "mlp.experts.down_proj":
            for expert, down in enumerate(value):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[prefix + short] = value
    shared = {
        "model.embed_tokens.weight": target.model.embed_tokens.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    tensors |= {
        f"{prefix}embed_tokens.weight": shared["model.embed_tokens.weight"].clone(),
        f"{prefix}shared_head.head.weight": shared["lm_head.weight"].clone(),
    }
    as_written = {**config.to_dict(), "num_nextn_predict_layers": 1}
    golden_files.write(name, tensors, as_written, shared, as_written, token_ids, hidden, torch.stack(logits))


def speculators(name, layer_config, *, in_qwens_layout=False):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.models.mtp.core import _prepare_mtp_position_ids
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer_config._attn_implementation = "eager"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer_config,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTED + 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = MTPDraftModel(config).float().eval()
    for weight in (model.embed_tokens.weight, model.lm_head.weight):
        torch.nn.init.normal_(weight)
    shake(model.mtp_layers)
    token_ids, hidden = text()
    own, mask = model.mtp_layers[0], torch.full((64, 64), -torch.inf).triu(1)

    def states(fed, tokens):
        """Returns the output of the head's layer for all rows. `fed`: each row's hidden state."""
        places, rotary = _prepare_mtp_position_ids(torch.arange(len(fed))[None], len(fed), layer_config.model_type)
        return own(
            hidden_states=fed[None],
            token_embeddings=model.embed_tokens(tokens)[None],
            attention_mask=mask[None, None, : len(fed), : len(fed)],
            position_ids=places,
            position_embeddings=model.rotary_emb(fed[None], rotary),
        )[0]

    fed, logits = hidden, []
    for place in range(COMMITTED, COMMITTED + DRAFTED + 1):
        state = states(fed, token_ids[1:place])[-1:]
        logits.append(model.lm_head(state[0]))
        fed = torch.cat([fed, state])
    # The head's own forward, that of training, must agree. Only its first step can, as later steps replace all rows.
    padded = torch.cat([hidden, torch.randn(DRAFTED + 1, HIDDEN)])
    whole = model(input_ids=torch.cat([token_ids, token_ids[:1]])[None], hidden_states=padded[None])[0]
    torch.testing.assert_close(logits[0], whole[0][0, COMMITTED - 2])
    tensors = {key: value for key, value in model.state_dict().items() if key.startswith("mtp_layers.")}
    written = config.to_dict() | {"transformer_layer_config": layer_config.to_dict()}
    if in_qwens_layout:
        names = {
            "input_proj": "fc",
            "final_layernorm": "norm",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "token_layernorm": "pre_fc_norm_embedding",
        }
        short = {key: key.removeprefix("mtp_layers.0.") for key in tensors}
        tensors = {
            f"mtp.{names[own]}.weight"
            if (own := short[key].removesuffix(".weight")) in names
            else f"mtp.layers.0.{short[key]}": value
            for key, value in tensors.items()
        }
        written = {"model_type": "qwen3_5", "text_config": layer_config.to_dict() | {"mtp_num_hidden_layers": 1}}
    target = {
        "model.embed_tokens.weight": model.embed_tokens.weight.detach(),
        "lm_head.weight": model.lm_head.weight.detach(),
    }
    golden_files.write(name, tensors, written, target, layer_config.to_dict(), token_ids, hidden, torch.stack(logits))


if __name__ == "__main__":
    torch.manual_seed(19)
    if sys.argv[1] == "transformers":
        with_target("mtp-glm", "glm4_moe", **GLM)
        with_target("mtp-deepseek", "deepseek_v3", **LATENT)
    else:
        from transformers import Qwen3Config
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

        layer_types = ["linear_attention", "full_attention"]
        gated = Qwen3_5TextConfig(**SIZES, layer_types=layer_types, partial_rotary_factor=0.5)
        speculators("mtp-speculators", Qwen3Config(**SIZES))
        speculators("mtp-qwen", gated, in_qwens_layout=True)
