"""Makes the head that a run trains: an untrained one in a published layout, or the head of `--init-from`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.errors import ConfigError
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.open import open_head
from outrider.training.block_student import BlockStudent
from outrider.training.dataset import Dataset
from outrider.training.plan import SEED, TrainingPlan
from outrider.training.student import Student

SCALE_SAMPLE = 10_000  # approximate number of tokens from which the scale of features is estimated

Parts = tuple[dict[str, Any], dict[str, Tensor]]
"""The content of config.json, and tensors by name, of which all weights are float32."""


def needed_taps(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """Returns the taps of the target's residual stream that the head needs, except the final hidden state.

    Raises: ConfigError, ModelError if training cannot continue from the head of `--init-from`.
    """
    if plan.init_from is None:
        return eagle3_taps(target.num_layers)
    head = open_head(plan.init_from, target, torch.device("cpu"), torch.float32)
    if head.form != "eagle3":
        raise ConfigError(f"--init-from {plan.init_from} is not an eagle3 head: its form is {head.form}")
    if target.num_layers in head.reduction.taps:  # the last layer's states are kept only after the final norm
        raise ConfigError(f"--init-from {plan.init_from} reads the last layer's output before the final norm")
    return head.reduction.taps


def make_student(plan: TrainingPlan, target: Target, dataset: Dataset, device: torch.device, *, name: str) -> Student:
    """Makes a new head, or opens the head of `--init-from`, whose reduction is not trained.

    `name`: the target's name. Raises: as `needed_taps`.
    """
    torch.manual_seed(SEED)
    dtype = TORCH_DTYPES[dataset.dtype]
    if plan.init_from is not None:
        return Student(Checkpoint.open(plan.init_from), target, device, dtype, trains_reduction=False)
    counts = dataset.answer_counts(target.vocab_size)
    kind = BlockStudent if plan.form == "dspark" else Student
    student = kind(new_head(plan, target, name, counts, device), target, device, dtype)
    # Held-out texts, because their hidden states stay: a run that is continued must find the same scales.
    apart = -(-int(dataset.starts[len(dataset.held_out)]) // SCALE_SAMPLE)
    student.scale_features(torch.cat([dataset.features(text)[apart // 2 :: apart] for text in dataset.held_out]))
    return student


def new_head(plan: TrainingPlan, target: Target, name: str, counts: Tensor, device: torch.device) -> Checkpoint:
    """Makes an untrained head that drafts only the tokens with the largest `counts` [vocab_size].

    Its weights are on the device. `name`: the target's name. Raises: ModelError.
    """
    ids = counts.argsort(descending=True, stable=True)[: plan.draft_vocab_size].sort().values
    if plan.form == "eagle3":
        config, tensors = _eagle3(target, name, ids)
    else:
        config, tensors = _dspark(plan, target, name, ids, counts)
    weights = {key: tensor.to(device) for key, tensor in tensors.items() if tensor.is_floating_point()}
    return Checkpoint.in_memory(plan.out, config, tensors | weights)


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the taps that the `speculators` library chooses: an early, a middle and a late layer."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1)}))


def _eagle3(target: Target, name: str, ids: Tensor) -> Parts:
    """Makes a head with one decoder layer shaped like the target's."""
    layer, hidden = _layer_config(target), target.hidden_size
    parts = _layer(layer, "layers.0.", 2 * hidden, "hidden_norm")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(eagle3_taps(target.num_layers)),
        "transformer_layer_config": layer,
    }
    return _speculator(target, name, ids, config, parts, num_tokens=3)


def _dspark(plan: TrainingPlan, target: Target, name: str, ids: Tensor, counts: Tensor) -> Parts:
    """Makes a head with decoder layers shaped like the target's. Until it is trained, its Markov head adds nothing."""
    layer = _layer_config(target) | {"model_type": "qwen3", "num_hidden_layers": plan.num_layers}
    hidden, rank = target.hidden_size, plan.rank
    parts = {
        "hidden_norm": torch.ones(hidden),
        "markov_head.markov_w1": _linear(rank, target.vocab_size),
        "markov_head.markov_w2": torch.zeros(len(ids), rank),
        "confidence_head.proj": torch.zeros(1, hidden + rank),
    }
    for prefix in (f"layers.{index}." for index in range(plan.num_layers)):
        parts |= _layer(layer, prefix, hidden, gain=1.0)  # what the residual stream begins with says nothing of masks
        parts |= {f"{prefix}self_attn.{norm}_norm": torch.ones(layer["head_dim"]) for norm in "qk"}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": plan.num_steps,
        "sample_from_anchor": True,
        "mask_token_id": len(counts) - 1 - int(counts.flip(0).argmin()),  # the last of the rarest tokens
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "aux_hidden_state_layer_ids": list(eagle3_taps(target.num_layers)),
        "transformer_layer_config": layer,
    }
    config, tensors = _speculator(target, name, ids, config, parts, num_tokens=plan.num_steps)
    return config, tensors | {"confidence_head.proj.bias": torch.zeros(1)}


def _layer(layer: Mapping[str, Any], prefix: str, width: int, *norms: str, gain: float = 0.2) -> dict[str, Tensor]:
    """Returns a decoder layer's weights. `width`: the width of attention's input. `norms`: further norms.

    `gain`: that of what the layer adds to the residual stream.
    """
    hidden, inner, dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    heads, kv_heads = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    parts = {
        "self_attn.q_proj": _linear(width, heads),
        "self_attn.k_proj": _linear(width, kv_heads),
        "self_attn.v_proj": _linear(width, kv_heads),
        "self_attn.o_proj": _linear(heads, hidden, gain),
        "mlp.gate_proj": _linear(hidden, inner),
        "mlp.up_proj": _linear(hidden, inner),
        "mlp.down_proj": _linear(inner, hidden, gain),
        **{norm: torch.ones(hidden) for norm in ("input_layernorm", "post_attention_layernorm", *norms)},
    }
    return {f"{prefix}{part}": tensor for part, tensor in parts.items()}


def _speculator(
    target: Target, name: str, ids: Tensor, config: dict[str, Any], parts: dict[str, Tensor], *, num_tokens: int
) -> Parts:
    """Adds what all heads in the layout of the `speculators` library have. `parts`: weights without that ending."""
    hidden, form = target.hidden_size, config["speculators_model_type"]
    taps = eagle3_taps(target.num_layers)
    parts |= {"fc": _linear(len(taps) * hidden, hidden), "lm_head": target.output_layer()[ids].float()}
    tensors = {f"{part}.weight": tensor for part, tensor in (parts | {"norm": torch.ones(hidden)}).items()}
    # d2t holds offsets: a draft id plus its offset is the target's id. The mask t2d requires ascending ids.
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    config |= {
        "speculators_version": "0.9.0",
        "draft_vocab_size": len(ids),
        "target_hidden_size": hidden,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": form,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": list(target.config.get("architectures") or [])},
        },
    }
    return config, tensors


def _layer_config(target: Target) -> dict[str, Any]:
    config, num_heads = target.config, int(target.config["num_attention_heads"])
    # Older configurations have `rope_theta` at the top level.
    theta = float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": target.hidden_size,
        "intermediate_size": int(config.get("intermediate_size") or 4 * target.hidden_size),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or target.hidden_size // num_heads),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": target.max_model_len,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _linear(width: int, out: int, gain: float = 1.0) -> Tensor:
    """Returns a random matrix [out, width] whose outputs are about `gain` times as large as its inputs."""
    return torch.randn(out, width) * (gain * width**-0.5)
