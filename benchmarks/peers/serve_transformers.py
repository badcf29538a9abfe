"""Serves transformers by lines of JSON (see asking.LineServer): `generate`, or continuous batching."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from serve_lines import arguments_parser, asked, say
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference import batching_config, greedy, load

from outrider.model_hub.config import ModelConfig

LOOKUP = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
MAX_RUNNING = 16
MAX_TOKENS = 1024  # maximum number of tokens of a prompt and its answer together
POLL_SECONDS = 0.5


def main() -> None:
    parser = arguments_parser()
    parser.add_argument("--way", choices=("generate", "batching"), required=True)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    model, _ = load(Path(arguments.model), ModelConfig(id=arguments.model, dtype=arguments.dtype))
    model.generation_config.eos_token_id = None  # so that every answer has the requested length
    if arguments.way == "batching":
        serve_batched(model, max_tokens=arguments.max_tokens)
    else:
        serve_generate(model, LOOKUP if arguments.lookup else {}, max_tokens=arguments.max_tokens)


class LineStreamer(BaseStreamer):
    """Writes tokens as they are generated. The first call of `put` has the prompt."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            say(id=self._number, tokens=value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        say(id=self._number, done=True)


@torch.inference_mode()
def serve_generate(model: Any, lookup: dict[str, int], *, max_tokens: int) -> None:
    say(ready=True)
    for number, prompt in asked():
        token_ids = torch.tensor([prompt])  # [1, num_tokens]
        config = greedy(max_tokens, model)
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=config,
            streamer=LineStreamer(number),
            **lookup,
        )


def serve_batched(model: Any, *, max_tokens: int) -> None:
    config = batching_config(longest_tokens=MAX_TOKENS, max_requests_per_batch=MAX_RUNNING)
    manager = model.init_continuous_batching(
        generation_config=greedy(max_tokens, model), continuous_batching_config=config
    )
    manager.start()
    threading.Thread(target=say_results, args=(manager,), daemon=True).start()
    say(ready=True)
    for number, prompt in asked():
        manager.add_request(prompt, request_id=str(number), max_new_tokens=max_tokens, streaming=True)
    manager.stop(block=True, timeout=POLL_SECONDS, hard_stop=True)


def say_results(manager: Any) -> None:
    num_said: dict[str, int] = {}
    while True:
        output = manager.get_result(timeout=POLL_SECONDS)
        if output is None:
            continue
        number, tokens = int(output.request_id), list(output.generated_tokens)
        new = tokens[num_said.get(output.request_id, 0) :]
        num_said[output.request_id] = len(tokens)
        if new:
            say(id=number, tokens=new)
        if output.error is not None:
            say(id=number, error=str(output.error))
        elif output.is_finished():
            say(id=number, done=True)


if __name__ == "__main__":
    main()
