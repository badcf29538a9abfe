"""Replays drafting on known answers, to compute the tokens per step that a head would have given.

The replay is exact for greedy decoding and for coupled sampling. Both accept a draft token if and only if the target
chooses the same token, so the text does not depend on drafts, and each draft is a function of the text before it. All
chains of an answer are drafted in one pass. Then the steps are counted: draft k tokens, accept what agrees, repeat.

Coupled sampling draws one arrival time (Gumbel-max noise) for each token of the vocabulary, which target and head share
(see docs/adr/0002-coupled-sampling.md). The noise of a sampled answer is not known. It is drawn again under the
condition that its sum with the target's logits is largest at the token that was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.heads.checkpoint import Target
from outrider.speculation.draft_tree import num_common
from outrider.speculation.proposers.ngram import NgramIndex
from outrider.training.dataset import Dataset
from outrider.training.student import Choose, Student

FIRST_GRADE = 4  # minimum tokens of a match after which lookup drafts first; after a shorter match, the head is better
SOURCES = ("head", "lookup", "lookup, then head")
HEAD, LOOKUP, BOTH = range(len(SOURCES))


Results = dict[tuple[str, float], np.ndarray]
"""By kind of text and temperature: numbers of steps [num_sources, max_k, max_k + 1] int64, indexed by source, k - 1 and
the number of accepted draft tokens."""


def walk(num_right: Sequence[int], prompt_length: int, k: int) -> list[int]:
    """Returns the number of accepted draft tokens in each step of one text.

    The first step begins at the second token of the answer, because the prefill node samples the first one. Steps end
    when fewer than k + 1 tokens remain. `num_right[n]`: how many tokens would be accepted of a draft that is made after
    n known tokens.
    """
    steps, known = [], prompt_length + 1
    while known + k < len(num_right):
        steps.append(min(num_right[known], k))
        known += steps[-1] + 1
    return steps


@torch.no_grad()
def replay(student: Student, target: Target, dataset: Dataset, texts: Sequence[int], *, max_k: int) -> Results:
    """Counts the steps of these texts, for each k from 1 to `max_k`."""
    device = student.device
    output = target.output_layer().to(device, student.target_output.dtype)
    generator = torch.Generator(device).manual_seed(1)
    results: Results = {}
    for text in texts:
        answer = dataset.text(text)
        tokens, prompt_length, temperature = answer.token_ids, len(answer.prompt), answer.temperature
        token_ids = dataset.token_ids(text).to(device, torch.long)
        noise = None
        if temperature > 0:
            final = dataset.final(text)[prompt_length - 1 : -1].to(device)
            logits = functional.linear(final, output).float() / temperature
            noise = torch.zeros(len(tokens) + max_k, len(student.target_ids), device=device)
            drawn = noise_given(logits, token_ids[prompt_length:], generator)
            noise[prompt_length : len(tokens)] = drawn[:, student.target_ids]
        features = dataset.features(text).to(device).float()
        drafts = student.draft(features, token_ids, max_k, _chooser(noise, temperature)).tolist()
        # The row with feature t and token t + 1 drafts after t + 2 known tokens.
        by_head = [
            num_common(draft, tokens[known : known + max_k]) for known, draft in enumerate(((), (), *drafts[:-2]))
        ]
        by_lookup, is_long = _look_up(tokens, max_k)
        both = [one if first else other for one, other, first in zip(by_lookup, by_head, is_long, strict=True)]
        counts = results.setdefault(
            (answer.kind, temperature), np.zeros((len(SOURCES), max_k, max_k + 1), dtype=np.int64)
        )
        for source, num_right in enumerate((by_head, by_lookup, both)):
            for k in range(1, max_k + 1):
                steps = np.array(walk(num_right, prompt_length, k), dtype=np.int64)
                counts[source, k - 1] += np.bincount(steps, minlength=max_k + 1)
    return results


def noise_given(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Draws Gumbel noise [n, v] under the condition that logits [n, v] + noise is largest at `chosen` [n].

    The largest sum is drawn first, because its value does not depend on which token has it. The other sums are drawn
    from distributions truncated at that value (Maddison et al. 2014, arXiv 1411.0030).
    """

    def gumbel(*shape: int) -> Tensor:
        uniform = torch.rand(shape, generator=generator, device=logits.device)
        return -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))

    logs = torch.log_softmax(logits, -1)
    largest = gumbel(len(logs), 1)
    sums = -torch.log(torch.exp(-(logs + gumbel(*logs.shape))) + torch.exp(-largest))
    sums.scatter_(1, chosen[:, None], largest)
    return sums - logs


def _chooser(noise: Tensor | None, temperature: float) -> Choose:
    """Returns the race of one text. `noise`: [num_tokens + max_k, draft_vocab_size] by position; None: greedy."""

    def choose(depth: int, logits: Tensor) -> Tensor:
        if noise is None:
            return logits.argmax(-1)
        raced = noise[2 + depth : 2 + depth + len(logits)]  # the chain of row t drafts position t + 2 + depth
        sums = torch.log_softmax(logits / temperature, -1)[: len(raced)] + raced
        return functional.pad(sums.argmax(-1), (0, len(logits) - len(raced)))

    return choose


def _look_up(tokens: Sequence[int], max_k: int) -> tuple[list[int], list[bool]]:
    """Returns, by number of known tokens, how many tokens a lookup drafts correctly and whether lookup is preferred."""
    index = NgramIndex()
    num_right, is_long = [0], [False]
    for known in range(1, len(tokens)):
        text = tokens[:known]
        index.extend(text, known)
        draft, grade = index.continuation(text, max_k)
        num_right.append(num_common(draft, tokens[known : known + max_k]))
        is_long.append(grade >= FIRST_GRADE)
    return num_right, is_long
