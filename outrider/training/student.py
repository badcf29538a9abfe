"""A head in training. Its `HeadModel` computes all chains of a batch of texts at once.

A chain is one draft. Its first step attends to the true rows up to the chain's own row. Each later step also attends to
the chain's earlier steps, as a drafter with a KV cache does (the training-time test of EAGLE-3, Li et al. 2025, arXiv
2503.01840).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from outrider.errors import ConfigError
from outrider.heads.base import HeadRows
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.open import open_head, opened
from outrider.training.dataset import Dataset
from outrider.training.new_heads import eagle3_taps, new_head
from outrider.training.plan import SEED, TrainingPlan, write_atomically

SCALE_SAMPLE = 10_000  # approximate number of tokens from which the scale of features is estimated
_NOT_TRAINED = "embed_tokens.weight"
"""Name of a head's own copy of the target's embedding, which is not trained."""


def needed_taps(plan: TrainingPlan, target: Target) -> tuple[int, ...]:
    """Returns the taps of the target's residual stream that the head needs, except the final hidden state.

    Raises: ConfigError, ModelError if training cannot continue from the head of `--init-from`.
    """
    if plan.form != "eagle3":
        return ()
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
    dtype = dataset.hidden.dtype
    if plan.init_from is not None:
        return Student(Checkpoint.open(plan.init_from), target, device, dtype, trains_reduction=False)
    counts = dataset.answer_counts(target.vocab_size)
    student = Student(new_head(plan, target, name, counts, device), target, device, dtype)
    if plan.form == "eagle3":
        student.scale_features(dataset.features[:: -(-len(dataset.features) // SCALE_SAMPLE)])
    return student


@dataclass(slots=True, eq=False)
class Chains:
    """All drafts of a batch of texts after some steps.

    Chain t of a text begins with the text's token t + 1 and feature t. In terms of outrider.heads.base.HeadRows, the
    chain begins at row t with depth 0, and has depth j after j steps.
    """

    hidden: Tensor  # [num_chains * num_texts, width]: inputs of the next step, ordered by chain, then by text
    num_texts: int
    first: int  # first chain that is continued; earlier ones make only their first step, as context of later ones
    depth: int = 0
    keys_values: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """By layer: keys and values of each step [num_texts, num_heads, num_chains, head_dim], repeated for query heads."""


class Student:
    """A head whose weights are trained in float32."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        device: torch.device,
        dtype: torch.dtype,
        *,
        trains_reduction: bool = True,
    ) -> None:
        """`dtype`: the dtype of the target's own tensors. Raises: as `open_head`."""
        with opened(checkpoint, target, device, torch.float32) as (head, files):
            fixed = set() if trains_reduction else set(files.places)
            files.target_dtype = dtype
            head.load(files)
        self.device = device
        self._config = checkpoint.config
        self._head, self._reduction = head, head.reduction.to(device, torch.float32)
        fixed.add(_NOT_TRAINED)
        self._places = {name: place for name, place in files.places.items() if name not in fixed}
        self._kept = {name: checkpoint.mapped(name).clone() for name in checkpoint.tensor_names - self._places.keys()}
        names: dict[Tensor, str] = {}
        for name, place in self._places.items():
            names.setdefault(place.weight, name)
        self.weights = {name: weight.requires_grad_() for weight, name in names.items()}
        """Trained weights by name of the stored tensor. A weight made of several tensors has the first one's name."""
        ids = torch.arange(target.vocab_size) if head.target_ids is None else head.target_ids
        self.target_ids = ids.to(device)  # [draft_vocab_size] int64: the tokens that the head drafts
        self.is_drafted = torch.zeros(target.vocab_size, dtype=torch.bool, device=device)
        self.is_drafted[self.target_ids] = True
        self.target_output = target.output_layer()[ids.cpu()].to(device, dtype)  # [draft_vocab_size, hidden_size]
        self._scale: Tensor | None = None  # [num_taps * hidden_size]: feature scales; `export` folds them into fc

    def scale_features(self, sample: Tensor) -> None:
        """Scales all channels of features to one size, with factors from `sample` [n, num_taps * hidden_size].

        The estimate uses the median, because the first token's features are a hundred times as large as all others.
        """
        median = sample.float().square().median(0).values
        self._scale = torch.rsqrt((2 * median).clamp_min(1e-6)).to(self.device)

    def start(self, features: Tensor, *, first: int = 0) -> Chains:
        """Begins a chain at each of the `features` [num_texts, num_tokens, num_taps * hidden_size] of the target."""
        if not self._head.spec.num_layers:
            features = features[:, first:]  # without attention, earlier chains are not needed as context
        elif self._head.spec.num_layers > 1:
            first = 0
        if self._scale is not None:
            features = features * self._scale.to(features.dtype)
        num_texts = len(features)
        hidden = self._reduction(features.flatten(0, 1)).unflatten(0, (num_texts, -1))
        return Chains(hidden.transpose(0, 1).flatten(0, 1), num_texts, first)

    def step(self, chains: Chains, token_ids: Tensor) -> Tensor:
        """Advances all chains by one draft token.

        `token_ids`: [num_texts, num_chains] int64, of all chains. Returns the head's own hidden states
        [num_texts, n, width] of the n chains from `first` on.
        """
        num_texts, num_chains = token_ids.shape
        begin = num_chains - len(chains.hidden) // num_texts  # the first chain that has a row
        skipped = chains.first - begin
        positions = torch.arange(begin, num_chains, device=self.device) + chains.depth
        rows = HeadRows(
            token_ids[:, begin:].T.flatten(),
            chains.hidden,
            torch.full((len(chains.hidden),), chains.depth),
            positions.repeat_interleave(num_texts),
            first_needed=skipped * num_texts,
        )
        chains.hidden = self._head.forward(rows, partial(_attend, chains, skipped))
        chains.depth += 1
        return chains.hidden.unflatten(0, (-1, num_texts)).transpose(0, 1)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Returns logits [n, draft_vocab_size] float32 for the head's own hidden states [n, width] of step `depth`."""
        return self._head.logits(hidden, torch.full((len(hidden),), depth))

    def export(self, folder: Path) -> None:
        """Writes model.safetensors, then config.json, which is written last as a sign of completeness. Raises: OSError.

        Trained weights are written in bfloat16, other tensors unchanged.
        """
        tensors = dict(self._kept)
        for name, (weight, rows, kept) in self._places.items():
            values = weight.detach()[rows]
            if self._scale is not None and weight is self._reduction.projection:
                values = values * self._scale
            if kept is not None:
                values = values.new_zeros(len(self.is_drafted), *values.shape[1:]).index_copy(0, kept, values)
            tensors[name] = values.to("cpu", torch.bfloat16).contiguous()
        write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        config = {**self._config, "torch_dtype": "bfloat16"}
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _attend(
    chains: Chains, skipped: int, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Implements `Attend` for one step of all chains. The first `skipped` chains need no result."""
    query, key, value = (
        rows.unflatten(0, (-1, chains.num_texts)).permute(1, 2, 0, 3) for rows in (query, key, value)
    )  # [num_texts, heads, num_chains, head_dim]
    group = query.shape[1] // key.shape[1]
    steps = chains.keys_values.setdefault(layer, [])
    steps.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
    seen = functional.pad(_over_steps(query[:, :, skipped:], steps, scaling), (0, 0, skipped, 0))
    return seen.permute(2, 0, 1, 3).flatten(0, 1)


def _over_steps(query: Tensor, steps: list[tuple[Tensor, Tensor]], scaling: float) -> Tensor:
    """Attends over the true rows and each chain's own steps. `steps` has the keys and values of both, in this order.

    `query`: [num_texts, num_heads, num_chains, head_dim], of the last chains. Returns the same shape.
    """
    (keys, values), *own = steps
    num_rows = keys.shape[2]
    mask = torch.ones(query.shape[2], num_rows, dtype=torch.bool, device=query.device).tril(num_rows - query.shape[2])
    if not own:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scores = [(query @ keys.transpose(-1, -2)).float().masked_fill(~mask, float("-inf"))]
    scores += [(query * key).float().sum(-1, keepdim=True) for key, _ in own]
    shares = torch.softmax(torch.cat(scores, -1) * scaling, -1).to(values.dtype)
    summed = shares[..., :num_rows] @ values
    for place, (_, value) in enumerate(own, num_rows):
        summed = summed + shares[..., place, None] * value
    return summed
