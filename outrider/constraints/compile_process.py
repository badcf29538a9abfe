"""A process that compiles constraints for a router. Some constraints would take minutes, and a thread cannot be killed.

    python -m outrider.constraints.compile_process

It reads lines of JSON: the first describes the tokenizer, the others are constraints. It answers each line with a
line of JSON: null, or an error message. The system kills the process if a constraint takes too much processor time or
memory.
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

from outrider.constraints.grammar import DATA_KEYWORDS, NAMED_SCHEMA_KEYWORDS, compile_grammar, open_tokenizer
from outrider.errors import InvalidRequestError, NotSupportedError
from outrider.request import Constraint, ConstraintKind

MAX_CPU_SECONDS = 0.5
"""Seconds of processor time that one compilation may take."""
MAX_MEMORY_BYTES = 4 << 30
"""Maximum size of the process's address space in bytes, most of which is never touched."""
LOCATE_SECONDS = 0.1
"""Seconds that may be spent on locating the faulty part of a schema."""

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
    """Returns why a constraint is invalid (for a schema, with the place of the fault), or None if it is valid.

    The system kills the process if a compilation takes MAX_CPU_SECONDS.
    """
    message = _error(tokenizer, constraint)
    if message is None or constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return message
    schema = json.loads(constraint.text)
    deadline = time.monotonic() + LOCATE_SECONDS

    def compiles(part: Schema) -> bool:
        """Returns whether a part compiles; True if no time is left to check."""
        if time.monotonic() > deadline:
            return True
        return _error(tokenizer, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(part))) is None

    place = "/".join(map(str, ("", *find_faulty_part(schema, compiles)))) if isinstance(schema, dict) else ""
    return f"{message} (at {place})" if place else message


def _error(tokenizer: LLTokenizer, constraint: Constraint) -> str | None:
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)  # then SIGVTALRM ends the process
    try:
        compile_grammar(tokenizer, constraint)
    except InvalidRequestError as error:
        return error.message
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def find_faulty_part(schema: Schema, compiles: Callable[[Schema], bool]) -> Path:
    """Returns the path to the innermost part of an invalid schema that does not compile by itself."""
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
        if keyword in DATA_KEYWORDS:
            continue
        if isinstance(value, list):
            yield from (((keyword, index), part) for index, part in enumerate(value))
        elif keyword in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
            yield from (((keyword, name), part) for name, part in value.items())
        else:
            yield (keyword,), value


if __name__ == "__main__":
    main()
