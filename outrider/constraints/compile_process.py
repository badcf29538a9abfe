"""A process that compiles constraints for a router: some would take minutes, and no thread can be ended.

    python -m outrider.constraints.compile_process

Reads lines of JSON: one that describes the tokenizer, then constraints. Answers each with a line: null, or what is
wrong. It is ended by the system when one takes too much of the processor or of memory.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLTokenizer

from outrider.constraints.grammar import compile_grammar, open_tokenizer
from outrider.errors import OutriderError
from outrider.request import Constraint, ConstraintKind

MAX_CPU_SECONDS = 0.5
MAX_MEMORY_BYTES = 4 << 30
"""Of address space, of which most is never touched."""
LOCATE_SECONDS = 0.1
"""Time for finding the part of a schema that is wrong."""

Schema = dict[str, Any]
Path = tuple[str | int, ...]

_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    described = json.loads(sys.stdin.readline())
    try:
        tokenizer = open_tokenizer(
            described["tokenizer"], vocab_size=described["vocab_size"], eos_token_ids=described["eos_token_ids"]
        )
    except OutriderError as error:
        _answer(error.message)
        return
    _answer(None)
    for line in sys.stdin:
        asked = json.loads(line)
        constraint = Constraint(ConstraintKind(asked["kind"]), asked["text"], tuple(asked["options"]))
        _answer(why_invalid(tokenizer, constraint))


def _answer(message: str | None) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def why_invalid(tokenizer: LLTokenizer, constraint: Constraint) -> str | None:
    """The error's message, with the place in a schema. Ends the process beyond `MAX_CPU_SECONDS`."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)  # SIGVTALRM ends the process
    try:
        compile_grammar(tokenizer, constraint)
    except OutriderError as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        schema = json.loads(constraint.text) if constraint.kind is ConstraintKind.JSON_SCHEMA else None
        if not isinstance(schema, dict):
            return error.message
        place = "/".join(map(str, ("", *faulty_part(schema, _compiles(tokenizer)))))
        return f"{error.message} (at {place})" if place else error.message
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def _compiles(tokenizer: LLTokenizer) -> Callable[[Schema], bool]:
    deadline = time.monotonic() + LOCATE_SECONDS

    def compiles(schema: Schema) -> bool:
        if time.monotonic() > deadline:
            return True  # not looked into
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)
        try:
            compile_grammar(tokenizer, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
        except OutriderError:
            return False
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return True

    return compiles


def faulty_part(schema: Schema, compiles: Callable[[Schema], bool]) -> Path:
    """Where the innermost part is that does not compile by itself, of a schema that does not."""
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: Path = ()
    while True:
        for step, part in _parts_of(schema):
            if not compiles({**definitions, **part}):
                path, schema = (*path, *step), part
                break
        else:
            return path


def _parts_of(schema: Schema) -> Iterator[tuple[Path, Schema]]:
    for name in _SCHEMAS:
        if isinstance(schema.get(name), dict):
            yield (name,), schema[name]
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            yield from (((name, index), part) for index, part in enumerate(schema[name]) if isinstance(part, dict))
    for name in _NAMED_SCHEMAS:
        if isinstance(schema.get(name), dict):
            yield from (((name, key), part) for key, part in schema[name].items() if isinstance(part, dict))


if __name__ == "__main__":
    main()
