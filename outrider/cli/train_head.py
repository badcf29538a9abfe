"""`outrider train-head`: trains a drafter head for a model and needs nothing but that model.

Ctrl-C or a kill loses little: the same command continues where the run stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from outrider.cli.cluster_arguments import add_cluster_arguments
from outrider.cli.config import sections_of
from outrider.cli.up import make_cluster
from outrider.cluster.event_printer import EventPrinter
from outrider.config.arguments import load_arguments
from outrider.errors import ConfigError
from outrider.training.plan import TrainingPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=Path, help="folder of the head; it is created if it is missing"
    )
    for item in TrainingPlan.options():
        parser.add_argument(item.metadata["flag"], dest=item.name, **item.metadata["argument"])
    parser.add_argument(
        "--writer-weights",
        choices=("auto", "int8", "int4"),
        help="model.weights of the cluster that writes prompts and answers; its faster approximation of the model does "
        "not affect what the head learns about them; default: the model's own",
    )
    add_cluster_arguments(parser, port=0)


def run(arguments: argparse.Namespace) -> int:
    """Trains the head. Raises: OutriderError."""
    from outrider.training.run import train_head  # imports torch

    settings = load_arguments(arguments, sections_of(None))
    given = {item.name: getattr(arguments, item.name) for item in TrainingPlan.options()}
    given = {name: value for name, value in given.items() if value is not None}
    plan = TrainingPlan(out=arguments.out, model=settings.sections["model"], **given)
    printer = EventPrinter(sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C

    writer = [] if arguments.writer_weights is None else [f"model.weights={arguments.writer_weights}"]
    of_cluster = argparse.Namespace(**{**vars(arguments), "overrides": [*arguments.overrides, *writer]})

    @contextlib.contextmanager
    def serve() -> Iterator[str]:
        cluster = make_cluster(of_cluster)
        cluster.on_event = printer.show
        with cluster:
            yield cluster.router_address

    try:
        printer.say(train_head(plan, serve, say=printer.say, progress=partial(printer.progress, "train-head")))
    except KeyboardInterrupt:
        printer.say(f"interrupted; the same command continues with the data in {plan.work}")
        raise
    except BrokenPipeError:
        raise  # the error comes from the terminal, not from the run
    except OSError as error:  # a full disk
        raise ConfigError(f"{error}; once this is fixed, the same command continues from {plan.work}") from error
    return 0
