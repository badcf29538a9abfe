"""`outrider chat`: a conversation on the terminal. Ctrl-C stops an answer, Ctrl-D ends."""

from __future__ import annotations

import argparse
import sys

from outrider.cli.connection import add_connection_arguments, add_target_argument, read_connection
from outrider.cli.generate import describe_stream
from outrider.cli.sampling_arguments import add_sampling_arguments, read_options, with_defaults_of
from outrider.client import ChatMessage, Client, GenerateOptions
from outrider.errors import OutriderError

HELP = "/reset clears the conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"


CHAT_SAMPLING = GenerateOptions(temperature=0.7)
"""Defaults if neither the user nor the model sets sampling, since small models ramble at the API's default of 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--stats", action="store_true", help="print tokens, times and acceptance after each answer")
    add_target_argument(parser)
    add_sampling_arguments(parser)
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401 gives input() its line editing and history
    options = read_options(arguments)
    start = [] if arguments.system is None else [ChatMessage("system", arguments.system)]
    messages = list(start)
    with Client(arguments.target, **read_connection(arguments)) as client:
        model = client.model()
        options = with_defaults_of(model, {**({} if model.default_sampling else CHAT_SAMPLING), **options})
        sys.stderr.write(f"{model.name} on {arguments.target}. {HELP}.\n")
        while True:
            line = _read_line()
            if line is None or line in ("/exit", "/quit"):
                return 0
            if line == "/reset":
                messages = list(start)
            elif line.startswith("/"):
                sys.stderr.write(f"{HELP}\n")
            elif line:
                stream = None
                try:
                    stream = client.generate([*messages, ChatMessage("user", line)], **options)
                    for delta in stream:
                        sys.stdout.write(delta.text)
                        sys.stdout.flush()
                    if arguments.stats:
                        sys.stderr.write("\n" + describe_stream(stream))
                except KeyboardInterrupt:
                    if stream is None:
                        continue
                    stream.cancel()
                    sys.stderr.write(" [stopped]")
                except OutriderError as error:
                    sys.stderr.write(f"{error}\n")
                    continue  # an unanswered message is not part of the conversation
                messages += [ChatMessage("user", line), ChatMessage("assistant", stream.text())]
                sys.stdout.write("\n")


def _read_line() -> str | None:
    """Returns the next line, or None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return ""
