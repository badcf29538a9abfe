"""Messages from decode nodes to draft nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.node import FeatureFormat
from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import DraftHello, SequenceStart, SequenceUpdate
from outrider.speculation.prefix_hash import prefix_hash


def hello_of(
    *,
    name: str = "decode",
    vocab_size: int = 100,
    vocabulary_fingerprint: str = "",
    max_model_len: int = 4096,
    features: FeatureFormat | None = None,
) -> DraftHello:
    return DraftHello(
        incarnation=bytes(16),
        name=name,
        vocab_size=vocab_size,
        vocabulary_fingerprint=vocabulary_fingerprint,
        max_model_len=max_model_len,
        features=features,
    )


def start_of(
    prompt_length: int, *, seed: int = 1, max_tokens: int = 1000, takes_trees: bool = False, **options: Any
) -> SequenceStart:
    options = RequestOptions(sampling=SamplingParams(seed=seed, max_tokens=max_tokens), **options)
    return SequenceStart(options=options, sample=0, prompt_length=prompt_length, takes_trees=takes_trees)


def update_of(text: Sequence[int], *, since: int = 0, max_tokens: int = 1000, **changes: Any) -> SequenceUpdate:
    """Returns the update of a text from token `since` on. The first two tokens are the prompt."""
    update = SequenceUpdate(
        sequence_id=1,
        start=None if since else start_of(2, max_tokens=max_tokens),
        start_length=since,
        token_ids=tuple(text[since:]),
        length=len(text),
        prefix_hash=prefix_hash(text),
        num_wanted=3,
    )
    return update._replace(**changes)
