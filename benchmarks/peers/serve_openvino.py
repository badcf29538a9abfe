"""Serves OpenVINO GenAI's continuous batching by lines of JSON (see asking.LineServer), in its own environment."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as ov_genai

LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
PRECISIONS = {
    "auto": {},
    "float32": {"INFERENCE_PRECISION_HINT": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=sorted(PRECISIONS), default="auto")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    arguments = parser.parse_args()

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

    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(inbox,), daemon=True).start()
    say(ready=True)
    serve(pipeline, config, inbox)


def read_lines(inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put(None)


def serve(pipeline: Any, config: Any, inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Serves prompts until standard input ends."""
    running: dict[int, Any] = {}
    while True:
        while not running or not inbox.empty():
            asked = inbox.get()
            if asked is None:
                return
            prompt = ov.Tensor(np.asarray([asked["prompt"]], dtype=np.int64))  # [1, num_tokens]
            running[asked["id"]] = pipeline.add_request(asked["id"], prompt, config)
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


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
