"""Serves CTranslate2 by lines of JSON (see asking.LineServer), in its own environment.

CTranslate2 has no continuous batching: a call takes a batch, and others wait until it ends. So all prompts that have
arrived make one batch.
"""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import ctranslate2
from serve_lines import Inbox, arguments_parser, inbox_of_prompts, say

GATHER_SECONDS = 0.02
MAX_BATCH = 16


def main() -> None:
    arguments = arguments_parser().parse_args()
    generator = ctranslate2.Generator(arguments.model, compute_type=arguments.dtype, intra_threads=arguments.threads)
    vocabulary = json.loads((Path(arguments.model) / "vocabulary.json").read_text(encoding="utf-8"))
    inbox = inbox_of_prompts()
    say(ready=True)
    while batch := next_batch(inbox):
        numbers = [number for number, _ in batch]

        def tell(step: Any, numbers: list[int] = numbers) -> bool:
            say(id=numbers[step.batch_id], tokens=[step.token_id])
            return False  # do not stop

        generator.generate_batch(
            [[vocabulary[token_id] for token_id in token_ids] for _, token_ids in batch],
            max_length=arguments.max_tokens,
            min_length=arguments.max_tokens,  # ignores the end of text
            include_prompt_in_result=False,  # computes the common length of all prompts at once
            callback=tell,
        )
        for number in numbers:
            say(id=number, done=True)


def next_batch(inbox: Inbox) -> list[tuple[int, list[int]]]:
    """Returns prompts that arrive at about the same time, at least one, or an empty list when input has ended."""
    batch = []
    prompt = inbox.get()
    while prompt is not None:
        batch.append(prompt)
        if len(batch) == MAX_BATCH:
            break
        try:
            prompt = inbox.get(timeout=GATHER_SECONDS)
        except queue.Empty:
            break
    return batch


if __name__ == "__main__":
    main()
