"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) in training, exported in the layout of the `speculators` library.

One decoder layer over (embedding, feature) pairs. `step` is the paper's training-time test: a chain's step sees the
true rows up to its own and its own steps after them, which is what a drafter with a cache sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.heads.checkpoint import Target
from outrider.training.forms.base import Chains, DraftVocabulary, Student


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """Of the layer: that of the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @classmethod
    def of(cls, target: Target) -> Eagle3Shape:
        config = target.config
        num_heads = int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or {}
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=int(config.get("intermediate_size") or 4 * target.hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or target.hidden_size // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            max_position_embeddings=int(config.get("max_position_embeddings", 32_768)),
        )


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """Speculators' choice: early, middle, late."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 1)}))


class Eagle3Student(Student):
    """Parameters have the layout's names, behind "layers.0." for those of the layer."""

    def __init__(
        self, shape: Eagle3Shape, vocabulary: DraftVocabulary, taps: tuple[int, ...], verifier: Mapping[str, Any]
    ) -> None:
        """`verifier`: name_or_path and architectures of the target."""
        super().__init__()
        self.shape, self.vocabulary, self.taps, self._verifier = shape, vocabulary, taps, verifier
        hidden, dim = shape.hidden_size, shape.head_dim
        num_heads, num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.fc = _linear(len(taps) * hidden, hidden)
        self.q_proj, self.o_proj = _linear(2 * hidden, num_heads * dim), _linear(num_heads * dim, hidden, 0.2)
        self.k_proj, self.v_proj = _linear(2 * hidden, num_kv_heads * dim), _linear(2 * hidden, num_kv_heads * dim)
        self.gate_proj, self.up_proj = (_linear(hidden, shape.intermediate_size) for _ in range(2))
        self.down_proj = _linear(shape.intermediate_size, hidden, 0.2)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(4)
        )
        self.lm_head = _linear(hidden, len(vocabulary.target_ids))
        self.lm_head.weight.data.copy_(vocabulary.output_rows)
        self.scale = nn.Buffer(torch.ones(len(taps) * hidden))  # of features; folded into fc by `tensors`

    def scale_features(self, sample: Tensor) -> None:
        """Brings channels to one size, by features [n, num_taps * hidden_size] of some tokens.

        By medians: the first token's are a hundred times as large as all others'.
        """
        median = sample.float().square().median(0).values
        self.scale.copy_(torch.rsqrt((2 * median).clamp_min(1e-6)))

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        hidden = self.fc(features * self.scale.to(features.dtype))
        return Chains(hidden, first, keys_values=[])

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        shape, depth, first = self.shape, chains.depth, chains.first
        assert chains.keys_values is not None
        embedding = self.vocabulary.embedding[token_ids].to(chains.hidden.dtype)
        rows = torch.cat((self._norm(embedding, self.input_layernorm), self._norm(chains.hidden, self.hidden_norm)), -1)
        num_texts, num_rows, _ = rows.shape
        start = first if depth else 0
        positions = torch.arange(start, start + num_rows, device=rows.device) + depth
        split = (num_texts, num_rows, -1, shape.head_dim)
        keys = self._rotate(self.k_proj(rows).view(split).transpose(1, 2), positions)
        chains.keys_values.append((keys, self.v_proj(rows).view(split).transpose(1, 2)))
        if not depth:
            rows, chains.hidden, positions = rows[:, first:], chains.hidden[:, first:], positions[first:]
        query = self.q_proj(rows).view(num_texts, -1, shape.num_attention_heads, shape.head_dim).transpose(1, 2)
        seen = _attend(self._rotate(query, positions), chains.keys_values, first)
        hidden = chains.hidden + self.o_proj(seen.transpose(1, 2).flatten(2))
        inner = self._norm(hidden, self.post_attention_layernorm)
        hidden = hidden + self.down_proj(functional.silu(self.gate_proj(inner)) * self.up_proj(inner))
        chains.hidden, chains.depth = hidden, depth + 1
        return hidden

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits: Tensor = self.lm_head(self._norm(hidden, self.norm))
        return logits

    def tensors(self) -> dict[str, Tensor]:
        layer = {
            "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        ids = self.vocabulary.target_ids
        known = torch.zeros(len(self.vocabulary.draft_ids), dtype=torch.bool)
        known[ids.cpu()] = True
        weights = {
            "fc.weight": self.fc.weight * self.scale,
            **{f"layers.0.{part}.{name}.weight": getattr(self, name).weight for part in layer for name in layer[part]},
            **{f"layers.0.{name}.weight": getattr(self, name) for name in norms},
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head.weight,
        }
        found = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
        # Offsets: the target's id of a draft id is their sum. The mask implies that ids rise.
        return found | {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": known}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up an exported head, with its draft vocabulary; `scale` is ones then, and fc is not trained."""
        for name, parameter in self.named_parameters():
            plain = name.removesuffix(".weight")
            stored = [tensor for key, tensor in tensors.items() if key.removesuffix(".weight").split(".")[-1] == plain]
            parameter.data.copy_(stored[0])
        self.fc.requires_grad_(requires_grad=False)

    def config(self) -> Mapping[str, Any]:
        shape = asdict(self.shape)
        layer = shape | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": len(self.vocabulary.draft_ids),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.shape.rope_theta},
        }
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": len(self.vocabulary.target_ids),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "target_hidden_size": self.shape.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "torch_dtype": "bfloat16",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": dict(self._verifier),
            },
        }

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return (wide * weight.float()).to(values.dtype)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """[num_texts, num_heads, num_rows, head_dim] by positions [num_rows]."""
        half = self.shape.head_dim // 2
        exponents = torch.arange(half, device=heads.device, dtype=torch.float32) / half
        angles = positions.float()[:, None] * self.shape.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        one, other = heads.float().split(half, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(heads.dtype)


def _attend(query: Tensor, keys_values: list[tuple[Tensor, Tensor]], first: int) -> Tensor:
    """Query [num_texts, num_heads, num_chains, head_dim] of chains from `first` on → the same shape."""
    (keys, values), *own = keys_values
    num_texts, num_heads, num_chains, dim = query.shape
    num_kv_heads, num_rows = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    seen = torch.ones(num_chains, num_rows, dtype=torch.bool, device=query.device).tril(first)
    if not own:
        wide_keys, wide_values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return functional.scaled_dot_product_attention(query, wide_keys, wide_values, attn_mask=seen)
    grouped = query.reshape(num_texts, num_kv_heads, group * num_chains, dim)
    shape = (num_texts, num_heads, num_chains, num_rows)
    scores = [(grouped @ keys.transpose(-1, -2)).reshape(shape).float().masked_fill(~seen, float("-inf"))]
    scores += [(query * key.repeat_interleave(group, 1)).float().sum(-1, keepdim=True) for key, _ in own]
    shares = torch.softmax(torch.cat(scores, -1) * dim**-0.5, -1).to(values.dtype)
    summed = shares[..., :num_rows].reshape(num_texts, num_kv_heads, group * num_chains, num_rows) @ values
    summed = summed.reshape(query.shape)
    for place, (_, value) in enumerate(own, num_rows):
        summed = summed + shares[..., place, None] * value.repeat_interleave(group, 1)
    return summed


def _linear(width: int, out: int, gain: float = 1.0) -> nn.Linear:
    linear = nn.Linear(width, out, bias=False)
    nn.init.normal_(linear.weight, std=gain * width**-0.5)
    return linear
