"""A head in training that drafts a block of tokens in one forward (DSpark, arXiv 2607.05147).

Each token of an answer is the anchor of one block. The block's rows attend to the target's features before the anchor
and to each other. The Markov head gets the text's tokens, i.e. the drafts of a block that has been right so far.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from outrider.heads.base import HeadRows
from outrider.training.cross_entropy import CrossEntropy
from outrider.training.dataset import Batch
from outrider.training.student import Choose, Student


class BlockStudent(Student):
    """A DSpark head whose weights are trained in float32."""

    def losses(self, batch: Batch, num_steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what `Student.losses` does. Step j is a block's token j, and a chain is a block.

        The confidence head learns the share of drafts that rejection sampling would accept. Its loss adds gradients,
        but is not a part of the returned losses.
        """
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_mixed):
            first, sizes = sum(batch.contexts), [list(batch.contexts), list(batch.lengths)]
            contexts, own = batch.features[:first].split(sizes[0]), batch.features[first:].split(sizes[1])
            answers, final = batch.answers.split(sizes[1]), batch.final.split(sizes[1])
            tokens = batch.token_ids[first:].split(sizes[1])
            parts = [
                self._losses(num_steps, torch.cat(features), *each)
                for features, *each in zip(zip(contexts, own, strict=True), tokens, answers, final, strict=True)
            ]
        losses, counts, hits = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        reached = batch.num_left > torch.arange(num_steps, device=self.device)[:, None]
        return losses, counts, hits, reached

    def _losses(
        self, num_steps: int, features: Tensor, tokens: Tensor, answer: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns losses, and whether they count, and hits [num_steps, n] of one text.

        `features`: those of the context and the chains; `tokens` [n] int64: the anchors; `answer` and `final`: as in
        Batch.
        """
        num, device = len(tokens), self.device
        with torch.no_grad():
            shares = torch.softmax(functional.linear(final, self.target_output).float(), -1)
            is_known = self.is_drafted[answer]
        anchors = torch.arange(len(features) - num + 1, len(features) + 1, device=device)
        hidden, logits = self._blocks(features, tokens, anchors)
        counts, hits = torch.zeros(2, num_steps, num, dtype=torch.bool, device=device).unbind()
        found = [torch.zeros(num, device=device)] * num_steps
        for step in range(min(num_steps, num)):
            rows = slice(num - step)  # blocks whose token at this step is in the answer
            previous = tokens.unfold(0, step + 1, 1)
            after, sure = self._head.logits_after(logits[rows, step], hidden[rows, : step + 1], previous)
            wanted = torch.arange(step, num, device=device)
            losses = CrossEntropy.apply(after, shares, wanted)
            if torch.is_grad_enabled():
                if sure is not None:
                    overlap = torch.minimum(after.detach().softmax(-1), shares[step:]).sum(-1) * is_known[step:]
                    confidence = functional.binary_cross_entropy_with_logits(sure, overlap, reduction="none")
                    losses = losses + confidence - confidence.detach()
            else:
                hits[step, rows] = (after.argmax(-1) == shares[step:].argmax(-1)) & is_known[step:]
            counts[step, rows] = is_known[step:]
            found[step] = functional.pad(losses * is_known[step:], (0, step))
        return torch.stack(found), counts, hits

    def draft(self, features: Tensor, token_ids: Tensor, num_steps: int, choose: Choose) -> Tensor:
        """Returns what `Student.draft` does. The block of feature t has the token t + 1 as its anchor."""
        anchors = torch.arange(1, len(token_ids), device=self.device)
        hidden, logits = self._blocks(features[: len(anchors)], token_ids[anchors], anchors)
        tokens = token_ids[anchors, None]
        for depth in range(num_steps):
            after, _ = self._head.logits_after(logits[:, depth], hidden[:, : depth + 1], tokens)
            tokens = torch.cat([tokens, self.target_ids[choose(depth, after)][:, None]], -1)
        return functional.pad(tokens[:, 1:], (0, 0, 0, 1))  # the last feature has no anchor

    def _blocks(self, features: Tensor, token_ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the blocks at `anchors` [n] int64, positions of one text whose tokens are `token_ids` [n] int64.

        `features`: [num_context, num_taps * hidden_size], at least those before the last anchor. Returns the head's own
        hidden states [n, num_parallel, width] of the rows that draft, and their logits [n, num_parallel, vocabulary]
        without what the tokens before add.
        """
        spec, num_context, num_blocks = self._head.spec, len(features), len(anchors)
        size = 1 + spec.num_masks
        if self._scale is not None:
            features = features * self._scale.to(features.dtype)
        context = self._reduction(features)
        tokens = torch.full((num_blocks, size), spec.mask_token_id, device=self.device)
        tokens[:, 0] = token_ids
        steps = torch.arange(size, device=self.device)
        rows = HeadRows(
            torch.cat([token_ids.new_zeros(num_context), tokens.flatten()]),
            torch.cat([context, context.new_zeros(num_blocks * size, context.shape[1])]),
            torch.cat([steps.new_zeros(num_context), (1 + steps).repeat(num_blocks)]),
            torch.cat([torch.arange(num_context, device=self.device), (anchors[:, None] + steps).flatten()]),
        )
        hidden = self._head.forward(rows, partial(_attend, anchors, size))[num_context:]
        hidden = hidden.unflatten(0, (num_blocks, size))[:, size - spec.num_parallel :]
        logits = self._head.logits(hidden.flatten(0, 1), rows.depths[: num_blocks * spec.num_parallel])
        return hidden, logits.unflatten(0, (num_blocks, -1))


def _attend(
    anchors: Tensor, size: int, _layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Implements `Attend` for the blocks of `size` rows at `anchors`, which follow the context's rows."""
    num_context = len(query) - len(anchors) * size
    group = query.shape[1] // key.shape[1]
    # [num_heads, num_context, head_dim], and [num_heads, num_blocks, size, head_dim]
    (_, query), (keys, own_keys), (values, own_values) = (
        (each[:num_context].transpose(0, 1), each[num_context:].unflatten(0, (-1, size)).permute(2, 0, 1, 3))
        for each in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    )
    is_before = torch.arange(num_context, device=query.device) < anchors[:, None, None]
    scores = (query.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (-1, size)).masked_fill(~is_before, -torch.inf)
    scores = torch.cat([scores, query @ own_keys.transpose(2, 3)], -1).float() * scaling
    shares = torch.softmax(scores, -1).to(values.dtype)
    of_context = (shares[..., :num_context].flatten(1, 2) @ values).unflatten(1, (-1, size))
    seen = (of_context + shares[..., num_context:] @ own_values).permute(1, 2, 0, 3).flatten(0, 1)
    return torch.cat([seen.new_zeros(num_context, *seen.shape[1:]), seen])
