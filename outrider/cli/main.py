"""`outrider COMMAND …`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from outrider import __version__
from outrider.errors import OutriderError

COMMANDS = {
    "up": "start a local cluster: router, prefill, decode and draft nodes",
    "generate": "stream the continuation of a prompt",
    "chat": "chat with the model",
    "config": "print all settings in force with their sources, import other servers' files, print a JSON schema",
    "demo": "stream three prompts with and without speculation, and one whose decode node is killed",
    "top": "show the cluster's nodes, load and rates on the terminal, live",
    "bench": "run a load test",
    "profile": "show where the wall clock goes in running nodes",
    "replay": "compute a kept answer again and compare token by token; exit status 1 if it differs",
    "train-head": "train a drafter head for a model; needs no data",
    "fetch": "download and verify the models; also validates every setting",
    "probe": "check a service's health; exit status 0 if it serves",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 for an error (one line on stderr), 2 for a wrong command line, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = next((argument for argument in argv if not argument.startswith("-")), "")
    try:
        arguments = make_parser(chosen).parse_args(argv)
        return int(arguments.run(arguments))
    except OutriderError as error:
        sys.stdout.flush()
        sys.stderr.write(f"outrider {chosen}: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        # Clients and routers install without what nodes need.
        sys.stderr.write(
            f"outrider {chosen}: {error.name} is not installed; in the source tree, run pip install '.[node]'\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser(chosen: str) -> argparse.ArgumentParser:
    """The flags of the chosen command only: the others' imports are not needed."""
    parser = argparse.ArgumentParser(
        prog="outrider", description="A language-model server in four gRPC services.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.", allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(f"outrider.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
