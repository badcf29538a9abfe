"""The flags of `generate` and `chat` that set request parameters."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from outrider.client import GenerateOptions, Model


def text_or_file(value: str) -> str:
    """Returns the text, or for `@FILE` the content of the file.

    Raises: argparse.ArgumentTypeError if the file is unreadable.
    """
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {value[1:]}: {error}") from error


def json_object(value: str) -> Any:
    """Parses a JSON object, given as text or as `@FILE`. Raises: argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        found = json.loads(text_or_file(value))
        if isinstance(found, dict):
            return found
    raise argparse.ArgumentTypeError(f"a JSON object is required, not {value}")


def seconds(value: str) -> float:
    """Parses a positive number of seconds. Raises: argparse.ArgumentTypeError; ValueError if `value` is no number."""
    if not 0 < (found := float(value)) < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is required, not {value}")
    return found


_VALUES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "model": (str, "NAME", "the name of an adapter; default: the model itself"),
    "adapter_fingerprint": (str, "HEX", "refuse another adapter of this name; default: any"),
    "temperature": (
        float,
        "T",
        "0 takes the most likely token; default: that of the model, otherwise 1, or 0.7 in a chat",
    ),
    "top_p": (float, "P", "nucleus sampling, (0, 1]"),
    "top_k": (int, "K", "0 keeps the whole vocabulary"),
    "min_p": (float, "P", "minimum probability relative to the most likely token"),
    "presence_penalty": (float, "X", "-2 to 2"),
    "frequency_penalty": (float, "X", "-2 to 2"),
    "repetition_penalty": (float, "X", "above 0; 1 is off"),
    "seed": (int, "S", "makes the answer reproducible"),
    "max_tokens": (int, "N", "default: the rest of the model's context window"),
    "min_tokens": (int, "N", "minimum number of tokens"),
    "num_speculative_tokens": (int, "K", "maximum draft tokens in one step"),
    "priority": (int, "P", "requests with higher priority go first"),
    "timeout_seconds": (seconds, "S", "seconds after which the request is given up"),
    "json_schema": (text_or_file, "SCHEMA", "answer with JSON of this schema; @FILE reads it"),
    "regex": (text_or_file, "PATTERN", "answer with a text that the whole pattern matches; @FILE reads it"),
    "grammar": (text_or_file, "LARK", "answer with a text of this grammar; @FILE reads it"),
    "chat_template_kwargs": (json_object, "JSON", "variables of the model's chat template; @FILE reads them"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each option. The flag's `dest` is the option's name."""
    for name, (kind, metavar, text) in _VALUES.items():
        flag = "--timeout" if name == "timeout_seconds" else "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, metavar=metavar, dest=name, help=text)
    parser.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these; repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_const", const=True, help="continue past the model's end of text")
    parser.add_argument(
        "--no-speculation",
        action="store_const",
        const=False,
        dest="speculation",
        help="decode without drafts; the tokens are the same",
    )


def read_options(arguments: argparse.Namespace) -> GenerateOptions:
    """Returns only the flags that were given."""
    given = {name: getattr(arguments, name, None) for name in GenerateOptions.__annotations__}
    return cast("GenerateOptions", {name: value for name, value in given.items() if value is not None})


def with_defaults_of(model: Model, options: GenerateOptions) -> GenerateOptions:
    """Fills in options from the model's generation_config.json; the rest have the defaults of the public API."""
    return cast("GenerateOptions", {**model.default_sampling, **options})
