"""A head in training. Its `HeadModel` computes all chains of a batch of texts at once.

A chain is one draft. Its first step attends to the true rows up to the chain's own row. Each later step also attends to
the chain's earlier steps, as a drafter with a KV cache does (the training-time test of EAGLE-3, Li et al. 2025, arXiv
2503.01840).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from outrider.heads.base import HeadRows
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.open import opened
from outrider.training.dataset import Batch
from outrider.training.plan import write_atomically

_NOT_TRAINED = "embed_tokens.weight"
"""Name of a head's own copy of the target's embedding, which is not trained."""

Choose = Callable[[int, Tensor], Tensor]
"""choose(depth, logits) chooses a draft token for each row of logits [n, draft_vocab_size] of a step. Row t is that of
the chain of feature t. Returns ids of the head [n] int64."""


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
        self._is_mixed = dtype == torch.bfloat16
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

    def losses(self, batch: Batch, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns losses [num_steps], hits and reached rows (each [num_steps, num_rows] bool), by step.

        The inputs of step j are the hidden states that the head computed in step j - 1, and the text's tokens, i.e. the
        drafts of a chain that has been right so far. A row is reached in a step if a chain leads to it with that many
        steps. It is a hit if the head then chooses the target's token.
        """
        rows = batch.texts, batch.places
        with torch.no_grad():
            shares = torch.softmax(functional.linear(batch.final, self.target_output).float(), -1)
            best = shares.argmax(-1)
            is_known = self.is_drafted[batch.token_ids[rows[0], rows[1] + 1]].float()
        losses, hits, reached = [], [], []
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_mixed):
            chains = self.start(batch.features, first=batch.first_chain)
            for step in range(num_steps):
                # The chain that leads to a row gets the text's tokens up to and including the row's own.
                hidden = self.step(chains, functional.pad(batch.token_ids[:, 1 + step :], (0, 1 + step)))
                # Rows that are not reached do not count. They are computed so that all steps have the same shapes.
                is_reached = batch.depths >= step
                counts = is_known * is_reached
                own = rows[0], (rows[1] - 1 - step - chains.first).clamp_min(0)
                logits = self.logits(hidden[own], step)
                loss = functional.cross_entropy(logits, shares, reduction="none")
                losses.append((loss * counts).sum() / counts.sum().clamp_min(1))
                hits.append((logits.argmax(-1) == best) & (counts > 0))
                reached.append(is_reached)
        return torch.stack(losses), torch.stack(hits), torch.stack(reached)

    def draft(self, features: Tensor, token_ids: Tensor, num_steps: int, choose: Choose) -> Tensor:
        """Returns [num_tokens, num_steps] int64: the draft of each feature's chain, as token ids of the target.

        `features`: [num_tokens, num_taps * hidden_size] of one text, whose tokens are `token_ids` [num_tokens] int64.
        """
        chains, tokens = self.start(features[None]), functional.pad(token_ids[1:], (0, 1))
        drafts: list[Tensor] = []
        for depth in range(num_steps):
            tokens = self.target_ids[choose(depth, self.logits(self.step(chains, tokens[None])[0], depth))]
            drafts.append(tokens)
        return torch.stack(drafts, 1)

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
