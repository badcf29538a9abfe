"""`outrider generate "prompt"`: streams an answer to standard output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from outrider.cli.connection import add_connection_arguments, add_target_argument, read_connection
from outrider.cli.sampling_arguments import add_sampling_arguments, read_options, with_defaults_of
from outrider.client import ChatMessage, Client, GenerateStream, Prompt
from outrider.client.options import make_request
from outrider.errors import InvalidRequestError
from outrider.request import TokenLogprobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user message in the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    parser.add_argument("--n", type=int, metavar="N", help="number of samples, printed one after the other")
    parser.add_argument(
        "--logprobs",
        dest="top_logprobs",
        type=int,
        metavar="K",
        help="with --json: print logprobs of each token and of the K most likely ones",
    )
    parser.add_argument(
        "--prompt-logprobs", type=int, metavar="K", help="with --json: print the same for the prompt's tokens"
    )
    parser.add_argument("--stats", action="store_true", help="print tokens, times and acceptance on standard error")
    add_target_argument(parser)
    add_sampling_arguments(parser)
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    options = read_options(arguments)
    options["token_bytes"] = True
    num_samples = arguments.n or 1
    logprobs: dict[int, list[Any]] = {}
    for name, flag in (("top_logprobs", "--logprobs"), ("prompt_logprobs", "--prompt-logprobs")):
        if name in options and not arguments.json:
            raise InvalidRequestError(f"{flag} needs --json", field=name)
    prompt = _prompt(arguments)
    make_request(prompt, options)  # validates both before any request is sent
    connection = read_connection(arguments)
    if arguments.timeout_seconds is not None:
        connection["timeout_seconds"] = arguments.timeout_seconds
    with (
        Client(arguments.target, **connection) as client,
        client.generate(prompt, **with_defaults_of(client.model(), options)) as stream,
    ):
        for delta in stream:
            logprobs.setdefault(delta.sample, []).extend(map(_logprobs_to_json, delta.logprobs))
            if num_samples == 1 and not arguments.json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        if arguments.json:
            sys.stdout.write(json.dumps(_to_json(stream, logprobs), ensure_ascii=False) + "\n")
        elif num_samples == 1:
            sys.stdout.write("\n")
        else:
            for sample in range(num_samples):
                sys.stdout.write(f"--- sample {sample}\n{stream.text(sample)}\n")
        sys.stdout.flush()
        if arguments.stats or (sys.stderr.isatty() and not arguments.json):
            sys.stderr.write(describe_stream(stream) + "\n")
    return 0


def describe_stream(stream: GenerateStream) -> str:
    """Returns one line for people: tokens, speed, times, acceptance, seed."""
    usage, metrics = stream.summary.usage, stream.summary.metrics
    streaming_seconds = max(metrics.e2e_seconds - metrics.ttft_seconds, 1e-9)
    parts = [f"{usage.num_generated_tokens} tokens", f"first after {metrics.ttft_seconds * 1e3:.0f} ms"]
    if usage.num_generated_tokens > 1:
        parts.append(f"then {(usage.num_generated_tokens - 1) / streaming_seconds:.1f} tokens/s")
    if metrics.speculation.num_spec_steps:
        parts.append(f"mean acceptance length {metrics.speculation.mean_acceptance_length:.2f}")
    return f"[{', '.join(parts)}, seed {stream.started.seed}]"


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not arguments.chat and arguments.system is None:
        return str(text)
    system = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
    return [*system, ChatMessage("user", text)]


def _logprobs_to_json(value: TokenLogprobs) -> dict[str, Any]:
    """Converts to JSON. If a token is only a part of a character, its text has U+FFFD, and only its bytes are exact."""
    entry = dataclasses.asdict(value)
    del entry["token_bytes"], entry["top_bytes"]
    if value.token_bytes:
        entry |= {"text": value.token_bytes.decode(errors="replace"), "bytes": list(value.token_bytes)}
        entry["top_texts"] = [each.decode(errors="replace") for each in value.top_bytes]
    return entry


def _to_json(stream: GenerateStream, logprobs: dict[int, list[Any]]) -> dict[str, Any]:
    prompt_logprobs = [_logprobs_to_json(entry) for entry in stream.started.prompt_logprobs]
    for entry in prompt_logprobs[:1]:
        entry["logprob"] = None  # the first token has no predecessor; NaN is not valid JSON
    return {
        "request_id": stream.summary.request_id,
        "model": stream.started.model,
        "seed": stream.started.seed,
        "samples": [
            {
                "sample": sample,
                "text": stream.text(sample),
                "token_ids": stream.token_ids(sample),
                "finish_reason": finished.reason.value,
                "stop_string": finished.stop_string,
                "stop_token_id": finished.stop_token_id,
                **({"logprobs": logprobs[sample]} if logprobs.get(sample) else {}),
            }
            for sample, finished in sorted(stream.finished.items())
        ],
        **({"prompt_logprobs": prompt_logprobs} if prompt_logprobs else {}),
        "usage": dataclasses.asdict(stream.summary.usage),
        "metrics": dataclasses.asdict(stream.summary.metrics),
    }
