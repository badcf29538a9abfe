"""Serves OpenVINO GenAI's continuous batching by lines of JSON (see asking.LineServer), in its own environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as ov_genai
from serve_lines import Inbox, arguments_parser, inbox_of_prompts, say

LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
PRECISIONS = {
    "auto": {},
    "float32": {"INFERENCE_PRECISION_HINT": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
}


def main() -> None:
    arguments = arguments_parser().parse_args()
    scheduler = ov_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    properties: dict[str, Any] = {**PRECISIONS[arguments.dtype], "INFERENCE_NUM_THREADS": arguments.threads}
    if arguments.lookup:
        properties["prompt_lookup"] = True
    pipeline = ov_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
    config = ov_genai.GenerationConfig()
    config.max_new_tokens = arguments.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    if arguments.lookup:
        for name, value in LOOKUP.items():
            setattr(config, name, value)

    inbox = inbox_of_prompts()
    say(ready=True)
    serve(pipeline, config, inbox)


def serve(pipeline: Any, config: Any, inbox: Inbox) -> None:
    """Serves prompts until standard input ends."""
    running: dict[int, Any] = {}
    while True:
        while not running or not inbox.empty():
            asked = inbox.get()
            if asked is None:
                return
            number, token_ids = asked
            prompt = ov.Tensor(np.asarray([token_ids], dtype=np.int64))  # [1, num_tokens]
            running[number] = pipeline.add_request(number, prompt, config)
        pipeline.step()
        for number, handle in list(running.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            if tokens:
                say(id=number, tokens=tokens)
            if handle.get_status() != ov_genai.GenerationStatus.RUNNING:
                del running[number]
                say(id=number, done=True)


if __name__ == "__main__":
    main()
