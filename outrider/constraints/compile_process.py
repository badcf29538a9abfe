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

from outrider.constraints.grammar import DATA, NAMED_SCHEMAS, compile_grammar, open_tokenizer
from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.request import Constraint, ConstraintKind

MAX_CPU_SECONDS = 0.5
MAX_MEMORY_BYTES = 4 << 30
"""Of address space, of which most is never touched."""
LOCATE_SECONDS = 0.1
"""Time for finding the part of a schema that is wrong."""

Schema = dict[str, Any]
Path = tuple[str | int, ...]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        tokenizer = open_tokenizer(**json.loads(sys.stdin.readline()))
    except NotSupportedError as error:
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
    message = _error(tokenizer, constraint)
    if message is None or constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return message
    schema = json.loads(constraint.text)
    deadline = time.monotonic() + LOCATE_SECONDS

    def compiles(part: Schema) -> bool:
        """Also what there is no time to look into."""
        if time.monotonic() > deadline:
            return True
        return _error(tokenizer, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(part))) is None

    place = "/".join(map(str, ("", *faulty_part(schema, compiles)))) if isinstance(schema, dict) else ""
    return f"{message} (at {place})" if place else message


def _error(tokenizer: LLTokenizer, constraint: Constraint) -> str | None:
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)  # SIGVTALRM ends the process
    try:
        compile_grammar(tokenizer, constraint)
    except InvalidRequestError as error:
        return error.message
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def faulty_part(schema: Schema, compiles: Callable[[Schema], bool]) -> Path:
    """Where the innermost part is that does not compile by itself, of a schema that does not."""
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: Path = ()
    while True:
        for step, part in _parts_of(schema):
            if isinstance(part, dict) and not compiles({**definitions, **part}):
                path, schema = (*path, *step), part
                break
        else:
            return path


def _parts_of(schema: Schema) -> Iterator[tuple[Path, Any]]:
    for keyword, value in schema.items():
        if keyword in DATA:
            continue
        if isinstance(value, list):
            yield from (((keyword, index), part) for index, part in enumerate(value))
        elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from (((keyword, name), part) for name, part in value.items())
        else:
            yield (keyword,), value


if __name__ == "__main__":
    main()
