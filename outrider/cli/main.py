"""`outrider COMMAND …`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Never

from outrider import __version__
from outrider.errors import OutriderError, UnauthenticatedError
from outrider.extras import explain_missing

COMMANDS = {
    "up": "start a local cluster: router, prefill, decode and draft nodes; `up MODEL` is `up --model MODEL`",
    "generate": "stream the continuation of a prompt",
    "chat": "chat with the model",
    "config": "print the effective settings with their sources, import files of other servers, print a JSON schema",
    "demo": "stream three prompts with and without speculation, and one whose decode node is killed",
    "top": "show the cluster's nodes, load and rates live on the terminal",
    "bench": "run a load test",
    "profile": "show how running nodes spend their time",
    "replay": "recompute a stored answer and compare it token by token; exit status 1 if it differs",
    "train-head": "train a drafter head for a model; needs no data",
    "fetch": "download and verify the models; also validates every setting",
    "probe": "check a service's health; exit status 0 if it is serving",
}
ALIASES = {
    **dict.fromkeys(("serve", "run", "start", "launch"), "up"),
    **dict.fromkeys(("pull", "download"), "fetch"),
    **dict.fromkeys(("complete", "completion", "prompt"), "generate"),
    **dict.fromkeys(("stats", "status", "ps"), "top"),
}
"""Outrider's commands, by the names that other servers have for them."""
NODE_STARTING_COMMANDS = ("up", "demo", "train-head", "fetch", "bench")
"""Commands that need the packages of nodes, which an install for clients lacks."""
WRONG_USE, INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line; argparse would print all flags first."""

    def error(self, message: str) -> Never:
        self.exit(WRONG_USE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an error (one line on stderr), 2 for a wrong command line, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = next((argument for argument in argv if not argument.startswith("-")), "")
    _open_streams()
    try:
        arguments = parse(argv, chosen)
        status = int(arguments.run(arguments))
        sys.stdout.flush()  # so that its errors are handled here, too
    except BrokenPipeError:  # the reader of the output is gone
        _drop_output()
        return 1
    except KeyboardInterrupt:
        _say("")
        return INTERRUPTED
    except (OutriderError, ModuleNotFoundError, UnicodeError, OSError) as error:
        _drop_output()
        _say(f"outrider {chosen}: {_describe_error(error, chosen)}")
        return 1
    return status


def _describe_error(error: OutriderError | ModuleNotFoundError | UnicodeError | OSError, chosen: str) -> str:
    """Describes the error in one line, with a remedy if there is one. Raises: the error itself if it is a bug."""
    match error:
        case UnauthenticatedError():
            return f"{error}; with a command: --token-file FILE"
        case OutriderError():
            is_away = error.reason == "UNREACHABLE"
            return f"{error}; `outrider up` starts a cluster, --target names one" if is_away else str(error)
        case ModuleNotFoundError():
            return explain_missing(error, starts_nodes=chosen in NODE_STARTING_COMMANDS)
        case UnicodeDecodeError():
            return f"the input is not text in {error.encoding}: byte {error.object[error.start]:#04x}"
        case UnicodeError():
            return f"this text cannot be written as bytes: {error}"
    problem = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {problem}" if error.filename else problem


def _open_streams() -> None:
    """Replaces closed standard streams by /dev/null. Makes stdout print "?" for characters that it cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 until the process ends
        elif name == "stdout" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Drops buffered output that can no longer be written, so that the interpreter reports no error at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def parse(argv: Sequence[str], chosen: str) -> argparse.Namespace:
    """Parses the command line. A wrong command line ends the process with one line on stderr and status 2."""
    parser = make_parser(chosen)
    if chosen and chosen not in COMMANDS:
        other = ALIASES.get(chosen) or difflib.get_close_matches(chosen, COMMANDS, n=1, cutoff=0.0)[0]
        parser.error(f"there is no command {chosen}; `outrider {other}`: {COMMANDS[other]}")
    arguments, others = parser.parse_known_args(argv)
    if others and chosen == "up" and not others[0].startswith("-") and getattr(arguments, "model.id") is None:
        at = len(argv) - 1 - list(reversed(argv)).index(others[0])
        return parse([*argv[:at], "--model", *argv[at:]], chosen)
    if others:
        command: argparse.ArgumentParser = arguments.command
        flag = others[0].partition("=")[0]
        nearest = difflib.get_close_matches(flag, sorted(_flags(command)), n=1) if flag.startswith("-") else []
        command.error(f"unknown argument {others[0]}{f'; the nearest is {nearest[0]}' if nearest else ''}")
    return arguments


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the parser's flags, including those of its subcommands."""
    for action in parser._actions:  # noqa: SLF001 argparse has no public accessor
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 likewise
            for inner in action.choices.values():
                yield from _flags(inner)


def make_parser(chosen: str) -> argparse.ArgumentParser:
    """Makes a parser with the flags of the chosen command only, to avoid the other commands' imports."""
    parser = _Parser(prog="outrider", description="A language-model server in four gRPC services.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.", allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f"outrider.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
