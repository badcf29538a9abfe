"""A head in training. Its `HeadModel` computes all chains of a batch of texts at once.

A chain is one draft. Its first step attends to the true rows up to the chain's own row. Each later step also attends to
the chain's earlier steps, as a drafter with a KV cache does (the training-time test of EAGLE-3, Li et al. 2025, arXiv
2503.01840).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


EVERY = slice(None)

Choose = Callable[[int, Tensor], Tensor]
"""choose(depth, logits) chooses a draft token for each row of logits [n, draft_vocab_size] of a step. Row t is that of
the chain of feature t. Returns ids of the head [n] int64."""


@dataclass(slots=True, eq=False)
class Chains:
    """All drafts of a batch of texts after some steps.

    The rows of a batch are, in this order, the context rows of all texts, which only make their first step, and the
    chains of all texts, each in the order of texts. A text's context rows are its first rows. Chain t of a text begins
    with the text's token t + 1 and feature t. In terms of outrider.heads.base.HeadRows, the chain begins at row t with
    depth 0, and has depth j after j steps.
    """

    hidden: Tensor  # [num_rows or num_chains, width]: inputs of the next step, and so states of the last one
    contexts: Sequence[int]  # number of context rows of each text
    lengths: Sequence[int]  # number of chains of each text
    positions: Tensor  # [num_rows or num_chains] int64: positions of the inputs of the next step
    depth: int = 0
    keys_values: dict[int, list[list[tuple[Tensor, Tensor]]]] = field(default_factory=dict)
    """By layer, step and text: keys and values [num_heads, n, head_dim], repeated for query heads."""
    block_logits: Tensor = field(init=False)  # [num_chains, num_parallel, draft_vocab_size], of a BlockStudent
    previous: Tensor = field(init=False)  # [num_chains, depth] int64: the tokens that its steps were given


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

    def start(self, features: Tensor, contexts: Sequence[int], lengths: Sequence[int]) -> Chains:
        """Begins chains. `features`: [num_rows, num_taps * hidden_size] of the target, by row as in `Chains`."""
        spans = [range(context) for context in contexts]
        spans += [range(context, context + length) for context, length in zip(contexts, lengths, strict=True)]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(self.device)
        if self._scale is not None:
            features = features * self._scale.to(features.dtype)
        return Chains(self._reduction(features), contexts, lengths, positions)

    def step(self, chains: Chains, token_ids: Tensor) -> None:
        """Advances all chains by one draft token.

        `token_ids`: [num_rows] int64 in the first step, and [num_chains] afterwards.
        """
        num_context = 0 if chains.depth else sum(chains.contexts)
        first_needed = num_context if self._head.spec.num_layers == 1 else 0
        rows = HeadRows(
            token_ids,
            chains.hidden,
            torch.full((len(chains.hidden),), chains.depth),
            chains.positions,
            first_needed=first_needed,
        )
        hidden = self._head.forward(rows, partial(_attend, chains, first_needed))
        chains.hidden = hidden[num_context - first_needed :]
        chains.positions = chains.positions[num_context:] + 1
        chains.depth += 1

    def logits(self, chains: Chains, rows: Tensor | slice = EVERY) -> tuple[Tensor, Tensor | None]:
        """Returns logits [n, draft_vocab_size] float32 of the last step of the chains `rows` [n] int64.

        The second value is as in `HeadModel.logits_after`.
        """
        hidden = chains.hidden[rows]
        return self._head.logits(hidden, torch.full((len(hidden),), chains.depth - 1)), None

    def losses(self, batch: Batch, num_steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns losses, and whether they count, hits, and whether steps are reached (bool).

        The inputs of step j are the hidden states that the head computed in step j - 1, and the text's tokens, i.e. the
        drafts of a chain that has been right so far.

        All are [num_steps, num_chains]. A step of a chain is reached if the answer has the token that it drafts, and
        counts if the head can draft that token. It is a hit if the head then chooses the target's token; hits are
        counted only without gradients.

        A head's confidence learns the share of drafts that rejection sampling would accept. Its loss adds gradients,
        but is not a part of the returned losses.
        """
        num_chains = len(batch.answers)
        with torch.no_grad():
            shares = torch.softmax(functional.linear(batch.final, self.target_output).float(), -1)
            is_known = self.is_drafted[batch.answers]
        found: list[tuple[Tensor, ...]] = []
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_mixed):
            chains, token_ids = self.start(batch.features, batch.contexts, batch.lengths), batch.token_ids
            for step in range(num_steps):
                self.step(chains, token_ids)
                token_ids = batch.token_ids[-num_chains:].roll(-1 - step)  # of chains that are not reached: any token
                is_reached, drafted = batch.num_left > step, torch.arange(num_chains, device=self.device) + step
                drafted.clamp_max_(num_chains - 1)
                counts = is_known[drafted] & is_reached
                (rows,) = counts.nonzero(as_tuple=True)  # the output layer is the dearest part
                losses, hits = torch.zeros(num_chains, device=self.device), torch.zeros_like(counts)
                if len(rows):
                    (logits, confidence), wanted = self.logits(chains, rows), drafted[rows]
                    own = functional.cross_entropy(logits, shares[wanted], reduction="none")
                    if not torch.is_grad_enabled():
                        hits[rows] = logits.argmax(-1) == shares.argmax(-1)[wanted]
                    elif confidence is not None:
                        overlap = torch.minimum(logits.detach().softmax(-1), shares[wanted]).sum(-1)
                        further = functional.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
                        own = own + further - further.detach()
                    losses = losses.index_copy(0, rows, own)
                found.append((losses, counts, hits, is_reached))
        losses, counts, hits, reached = (torch.stack(each) for each in zip(*found, strict=True))
        return losses, counts, hits, reached

    def draft(self, features: Tensor, token_ids: Tensor, num_steps: int, choose: Choose) -> Tensor:
        """Returns [num_tokens, num_steps] int64: the draft of each feature's chain, as token ids of the target.

        `features`: [num_tokens, num_taps * hidden_size] of one text, whose tokens are `token_ids` [num_tokens] int64.
        """
        chains, tokens = self.start(features, [0], [len(features)]), functional.pad(token_ids[1:], (0, 1))
        drafts: list[Tensor] = []
        for depth in range(num_steps):
            self.step(chains, tokens)
            tokens = self.target_ids[choose(depth, self.logits(chains)[0])]
            drafts.append(tokens)
        return torch.stack(drafts, 1)

    def export(self, folder: Path) -> None:
        """Writes model.safetensors, then config.json, which is written last as a sign of completeness. Raises: OSError.

        Trained weights are written in bfloat16, other tensors unchanged.
        """
        tensors = dict(self._kept)
        for name, (weight, rows) in self._places.items():
            values = weight.detach()[rows]
            if self._scale is not None and weight is self._reduction.projection:
                values = values * self._scale
            tensors[name] = values.to("cpu", torch.bfloat16).contiguous()
        write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        config = {**self._config, "torch_dtype": "bfloat16"}
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _attend(
    chains: Chains, skipped: int, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Implements `Attend` for one step of all chains, text by text. The first `skipped` rows need no result."""
    group = query.shape[1] // key.shape[1]
    keys, values = (by_text(chains, each.repeat_interleave(group, 1)) for each in (key, value))
    steps = chains.keys_values.setdefault(layer, [])
    steps.append(list(zip(keys, values, strict=True)))
    is_whole = not chains.depth and not skipped
    if is_whole:
        queries = by_text(chains, query)
    else:
        queries = [part.transpose(0, 1) for part in query[skipped:].split(list(chains.lengths))]
    texts = zip(queries, zip(*steps, strict=True), strict=True)
    # For texts of some hundred tokens in bfloat16 on a CPU, torch's own attention takes 1.3 times as long.
    seen = [over_steps(each[:, :, None], own, scaling)[:, :, 0].transpose(0, 1) for each, own in texts]
    if not is_whole:
        return torch.cat([torch.zeros_like(query[:skipped]), *seen])
    contexts = [each[:size] for each, size in zip(seen, chains.contexts, strict=True)]
    return torch.cat([*contexts, *(each[size:] for each, size in zip(seen, chains.contexts, strict=True))])


def by_text(chains: Chains, rows: Tensor) -> list[Tensor]:
    """Splits rows [n, num_heads, head_dim] of a step into those of each text [num_heads, num_rows, head_dim]."""
    if chains.depth:
        return [part.transpose(0, 1) for part in rows.split(list(chains.lengths))]
    parts = rows.split([*chains.contexts, *chains.lengths])
    pairs = zip(parts[: len(chains.contexts)], parts[len(chains.contexts) :], strict=True)
    return [torch.cat(pair).transpose(0, 1) for pair in pairs]


def over_steps(query: Tensor, steps: Sequence[tuple[Tensor, Tensor]], scaling: float) -> Tensor:
    """Attends over a text's true rows and each chain's own rows. `steps`: the keys and values of both, in this order.

    `query`: [num_heads, num_chains, num_queries, head_dim], of the text's last chains. Returns the same shape.
    """
    (keys, values), *own = steps
    shape, num_chains, num_rows = query.shape[1:3], query.shape[1], keys.shape[1]
    unseen = torch.full((num_chains, num_rows), -torch.inf, dtype=query.dtype, device=query.device)
    query = query * scaling
    scores = [(query.flatten(1, 2) @ keys.transpose(-1, -2)).unflatten(1, shape)]
    scores[0] += unseen.triu(num_rows - num_chains + 1)[:, None]
    scores += [(query * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    shares = torch.softmax(torch.cat(scores, -1), -1, dtype=torch.float32).to(values.dtype)
    summed = (shares[..., :num_rows].flatten(1, 2) @ values).unflatten(1, shape)
    for place, (_, value) in enumerate(own, num_rows):
        summed = summed + shares[..., place, None] * value[:, :, None]
    return summed
