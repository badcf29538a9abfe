"""How many tokens a step a head would have given on answers that are known: drafting on them is replayed.

Exact for greedy decoding and for coupled sampling. Both accept a draft token if and only if it is the target's own
choice, so the text is the target's whatever was drafted, and every draft is a function of the text before it. All
chains of an answer are drafted in one pass; then steps are walked through: draft k, accept what agrees, go on.

A sampled answer was drawn by one arrival for each token of the vocabulary, which the head's race uses too (see
docs/adr/0002-coupled-sampling.md). Those arrivals are drawn again, given the answer: as Gumbel noise whose sum with the
target's logits is largest at the token that was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from outrider.heads.checkpoint import Target
from outrider.speculation.proposers.ngram import NgramIndex, NgramSegment
from outrider.training.dataset import Dataset
from outrider.training.forms.base import Student

FIRST_GRADE = 4  # tokens that have stood there before: with fewer the head is right more often
HEAD, LOOKUP, BOTH = SOURCES = ("head", "lookup", "lookup, then head")


@dataclass(slots=True)
class Walk:
    """Sums over walks with one k."""

    num_tokens: int = 0
    num_steps: int = 0
    tried: list[int] = field(default_factory=list)  # steps that had a draft at this position, those before being right
    accepted: list[int] = field(default_factory=list)  # of those, with a right one there

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def add(self, text: Sequence[int], prompt_length: int, k: int, drafts: Sequence[Sequence[int]]) -> None:
        """From the second token of the answer on, as the prefill node gives the first, while k + 1 more are known.

        `drafts`: by number of known tokens; k of each are used.
        """
        self.tried = self.tried or [0] * k
        self.accepted = self.accepted or [0] * k
        known = prompt_length + 1
        while known + k + 1 <= len(text):
            draft = drafts[known][:k]
            right = 0
            while right < len(draft) and draft[right] == text[known + right]:
                right += 1
            for position in range(min(right + 1, len(draft))):
                self.tried[position] += 1
                self.accepted[position] += position < right
            known += right + 1
            self.num_tokens += right + 1
            self.num_steps += 1


Results = dict[tuple[str, float, str, int], Walk]
"""By kind of text, temperature, source and k."""


@torch.no_grad()
def replay(student: Student, target: Target, dataset: Dataset, texts: Sequence[int], *, most: int) -> Results:
    """Walks through these texts with k = 1 … `most`."""
    device = student.vocabulary.embedding.device
    output = target.output_layer().to(device, student.vocabulary.embedding.dtype)
    generator = torch.Generator(device).manual_seed(1)
    results: Results = {}
    for text in texts:
        rows, prompt_length = dataset.rows(text), dataset.index.prompt_lengths[text]
        temperature, kind = dataset.index.temperatures[text], dataset.index.kinds[text]
        token_ids = dataset.tokens[rows]
        hidden = dataset.hidden[rows].to(device)
        final = hidden[:, -target.hidden_size :]
        noise = None
        if temperature > 0:
            logits = functional.linear(final[prompt_length - 1 : -1], output).float() / temperature
            noise = torch.zeros(len(token_ids) + most, len(student.vocabulary.target_ids), device=device)
            drawn = noise_given(logits, token_ids[prompt_length:].to(device), generator)
            noise[prompt_length : len(token_ids)] = drawn[:, student.vocabulary.target_ids]
        is_own_final = hidden.shape[1] == target.hidden_size
        features = hidden if is_own_final else hidden[:, : -target.hidden_size]
        drafts = _draft(student, features, token_ids.to(device), most, temperature, noise).tolist()
        tokens = token_ids.tolist()
        found, is_long = _look_up(tokens, most)
        by_head = [(), (), *drafts][: len(found)]  # feature t and token t + 1 draft behind t + 2 known tokens
        both = [one if first else other for one, other, first in zip(found, by_head, is_long, strict=True)]
        for source, known_drafts in ((HEAD, by_head), (LOOKUP, found), (BOTH, both)):
            for k in range(1, most + 1):
                walk = results.setdefault((kind, temperature, source, k), Walk())
                walk.add(tokens, prompt_length, k, known_drafts)
    return results


def noise_given(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise [n, v] given that logits [n, v] + noise is largest at `chosen` [n].

    The largest sum's value is drawn first; it does not depend on which token has it. The others' are cut off below it
    (Maddison et al. 2014, arXiv 1411.0030).
    """

    def gumbel(*shape: int) -> Tensor:
        uniform = torch.rand(shape, generator=generator, device=logits.device)
        return -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))

    logs = torch.log_softmax(logits, -1)
    largest = gumbel(len(logs), 1)
    sums = -torch.log(torch.exp(-(logs + gumbel(*logs.shape))) + torch.exp(-largest))
    sums.scatter_(1, chosen[:, None], largest)
    return sums - logs


def _draft(
    student: Student, features: Tensor, token_ids: Tensor, most: int, temperature: float, noise: Tensor | None
) -> Tensor:
    """[num_tokens, most]: what the chain of each feature drafts, as ids of the target."""
    chains = student.start(features[None].float())
    tokens = functional.pad(token_ids[1:], (0, 1))
    drafts: list[Tensor] = []
    for depth in range(most):
        hidden = student.step(chains, tokens[None])[0]
        logits = student.logits(hidden, depth).float()
        if noise is not None:
            raced = noise[2 + depth : 2 + depth + len(tokens)]  # the chain of row t drafts position t + 2 + depth
            logits = torch.log_softmax(logits / temperature, -1)[: len(raced)] + raced
            logits = functional.pad(logits, (0, 0, 0, len(tokens) - len(raced)))
        tokens = student.vocabulary.target_ids[logits.argmax(-1)]
        drafts.append(tokens)
    return torch.stack(drafts, 1)


def _look_up(tokens: Sequence[int], most: int) -> tuple[list[Sequence[int]], list[bool]]:
    """By number of known tokens: what followed their longest known ending, and whether that goes before the head."""
    index = NgramIndex(NgramSegment(0, len(tokens)))
    found: list[Sequence[int]] = [()]
    is_long = [False]
    for known in range(1, len(tokens) + 1):
        text = tokens[:known]
        index.extend(text, known)
        token_ids, grade = index.continuation(text, most)
        found.append(token_ids)
        is_long.append(grade >= FIRST_GRADE)
    return found, is_long
