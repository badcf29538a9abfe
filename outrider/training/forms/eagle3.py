"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) in training, exported in the layout of the `speculators` library.

One decoder layer over (embedding, feature) pairs. `step` is the paper's training-time test: a chain's step sees the
true rows up to its own and its own steps after them, which is what a drafter with a cache sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.engine.features import rms_norm
from outrider.engine.rotation import inverse_frequencies
from outrider.heads.checkpoint import Target
from outrider.heads.layers import rotate
from outrider.training.forms.base import Chains, DraftVocabulary, Student, linear, output_layer


def layer_config_of(target: Target) -> dict[str, Any]:
    """The head's layer, as the layout describes it: of the shape of the target's."""
    config, num_heads = target.config, int(target.config["num_attention_heads"])
    theta = _rope_theta(config)
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


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Older configurations have it beside other fields."""
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """Speculators' choice: early, middle, late."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1)}))


class Norm(nn.RMSNorm):
    """As heads compute it: in float32, of any type."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config["hidden_size"])
        self._epsilon = config.get("rms_norm_eps", 1e-6)

    def forward(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self._epsilon)


class Eagle3Student(Student):
    """Parameters have the layout's names."""

    def __init__(
        self,
        layer_config: Mapping[str, Any],
        vocabulary: DraftVocabulary,
        taps: tuple[int, ...],
        verifier: Mapping[str, Any],
    ) -> None:
        """`verifier`: name_or_path and architectures of the target."""
        super().__init__()
        self.vocabulary, self.taps = vocabulary, taps
        self._layer_config, self._verifier = layer_config, verifier
        hidden, inner = layer_config["hidden_size"], layer_config["intermediate_size"]
        num_heads = layer_config["num_attention_heads"]
        num_kv_heads = layer_config.get("num_key_value_heads") or num_heads
        self._group = num_heads // num_kv_heads  # query heads to one of keys and values
        dim = self._head_dim = layer_config.get("head_dim") or hidden // num_heads
        frequencies = torch.from_numpy(inverse_frequencies(_rope_theta(layer_config), dim))
        self._frequencies = nn.Buffer(frequencies, persistent=False)  # [head_dim / 2] float32
        self.fc = linear(len(taps) * hidden, hidden)
        attention = {
            "q_proj": linear(2 * hidden, num_heads * dim),
            "k_proj": linear(2 * hidden, num_kv_heads * dim),
            "v_proj": linear(2 * hidden, num_kv_heads * dim),
            "o_proj": linear(num_heads * dim, hidden, 0.2),
        }
        feed_forward = {
            "gate_proj": linear(hidden, inner),
            "up_proj": linear(hidden, inner),
            "down_proj": linear(inner, hidden, 0.2),
        }
        norms = {name: Norm(layer_config) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        parts = {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(feed_forward), **norms}
        self.layers = nn.ModuleList([nn.ModuleDict(parts)])
        self.norm = Norm(layer_config)
        self.lm_head = output_layer(vocabulary)
        self.scale = nn.Buffer(torch.ones(len(taps) * hidden))  # of features; folded into fc by `tensors`

    def scale_features(self, sample: Tensor) -> None:
        """Brings channels to one size, by features [n, num_taps * hidden_size] of some tokens.

        By medians: the first token's are a hundred times as large as all others'.
        """
        median = sample.float().square().median(0).values
        self.scale.copy_(torch.rsqrt((2 * median).clamp_min(1e-6)))

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        return Chains(self.fc(features * self.scale.to(features.dtype)), first)

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        attention, mlp, depth, skipped = layer["self_attn"], layer["mlp"], chains.depth, chains.first
        embedding = self.vocabulary.embedding[token_ids].to(chains.hidden.dtype)
        rows = torch.cat((layer["input_layernorm"](embedding), layer["hidden_norm"](chains.hidden)), -1)
        positions = torch.arange(rows.shape[1], device=rows.device) + (skipped if depth else 0) + depth
        keys = self._rotated(attention["k_proj"](rows), positions).repeat_interleave(self._group, 1)
        values = self._heads(attention["v_proj"](rows)).repeat_interleave(self._group, 1)
        chains.keys_values.append((keys, values))
        if not depth:
            rows, chains.hidden, positions = rows[:, skipped:], chains.hidden[:, skipped:], positions[skipped:]
        seen = _attend(self._rotated(attention["q_proj"](rows), positions), chains.keys_values, skipped)
        hidden = chains.hidden + attention["o_proj"](seen.transpose(1, 2).flatten(2))
        inner = layer["post_attention_layernorm"](hidden)
        hidden = hidden + mlp["down_proj"](functional.silu(mlp["gate_proj"](inner)) * mlp["up_proj"](inner))
        chains.hidden, chains.depth = hidden, depth + 1
        return hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        ids = self.vocabulary.target_ids
        return {
            **dict(self.named_parameters()),
            "fc.weight": self.fc.weight * self.scale,
            # Offsets: the target's id of a draft id is their sum. The mask implies that ids rise.
            "d2t": ids - torch.arange(len(ids), device=ids.device),
            "t2d": self.vocabulary.draft_ids >= 0,
        }

    def config(self) -> Mapping[str, Any]:
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": len(self.vocabulary.target_ids),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "target_hidden_size": self._layer_config["hidden_size"],
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "torch_dtype": "bfloat16",
            "transformer_layer_config": dict(self._layer_config),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": dict(self._verifier),
            },
        }

    def _heads(self, rows: Tensor) -> Tensor:
        """[num_texts, num_rows, num_heads * head_dim] → [num_texts, num_heads, num_rows, head_dim]."""
        return rows.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

    def _rotated(self, rows: Tensor, positions: Tensor) -> Tensor:
        """`_heads`, at these positions [num_rows]."""
        angles = positions.float()[:, None] * self._frequencies
        return rotate(self._heads(rows).float(), (angles.cos(), angles.sin())).to(rows.dtype)


def _attend(query: Tensor, keys_values: list[tuple[Tensor, Tensor]], first: int) -> Tensor:
    """Query [num_texts, num_heads, num_chains, head_dim] of chains from `first` on → the same shape.

    Keys and values: of the true rows, then of each own step.
    """
    (keys, values), *own = keys_values
    num_rows = keys.shape[2]
    seen = torch.ones(query.shape[2], num_rows, dtype=torch.bool, device=query.device).tril(first)
    if not own:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    scores = [(query @ keys.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))]
    scores += [(query * key).float().sum(-1, keepdim=True) for key, _ in own]
    shares = torch.softmax(torch.cat(scores, -1) * query.shape[-1] ** -0.5, -1).to(values.dtype)
    summed = shares[..., :num_rows] @ values
    for place, (_, value) in enumerate(own, num_rows):
        summed = summed + shares[..., place, None] * value
    return summed
