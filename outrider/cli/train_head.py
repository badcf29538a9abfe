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

PLAN_ARGUMENTS = {  # for each field of the plan: flag, type, metavariable, help
    "form": ("--form", str, "FORM", "form of the head: eagle3 (default) or dspark"),
    "minutes": ("--minutes", float, "N", "minutes that the whole run should take; default 60"),
    "prompts": ("--prompts", Path, "FILE", 'JSONL: {"text": …} or {"messages": […]}; default: the model writes them'),
    "traffic": ("--from-traffic", Path, "DIR", "train on the answers that decode_node.keep_answers has stored there"),
    "init_from": ("--init-from", Path, "HEAD", "continue from this eagle3 head, and keep its feature layers"),
    "draft_vocab_size": (
        "--draft-vocab",
        int,
        "N",
        "size of the head's vocabulary, the most frequent tokens; default 4096",
    ),
    "num_steps": (
        "--steps",
        int,
        "N",
        "number of draft tokens that are trained, each from the head's own outputs, or as a dspark block; default 4",
    ),
    "num_layers": ("--layers", int, "N", "decoder layers of a dspark head; default 1"),
    "rank": ("--rank", int, "N", "rank of the part of a dspark head that knows the token before; default 64"),
    "answer_tokens": ("--answer-tokens", int, "N", "answer tokens to write, in place of a quarter of --minutes"),
    "passes": ("--passes", float, "N", "passes over all training texts, in place of a limit of time for them"),
    "batch_tokens": ("--batch-tokens", int, "N", "answer tokens in a training step; default 1024"),
    "feature_gb": ("--feature-gb", float, "N", "disk space for hidden states in GB; default: half of what is free"),
    "learning_rate": ("--rate", float, "R", "learning rate; default 0.0012"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=Path, help="folder of the head; it is created if it is missing"
    )
    for name, (flag, kind, metavar, text) in PLAN_ARGUMENTS.items():
        parser.add_argument(flag, dest=name, metavar=metavar, type=kind, help=text)
    parser.add_argument(
        "--writer-weights",
        choices=("auto", "int8", "int4"),
        help="model.weights of the cluster that writes prompts and answers; its faster approximation of the model does "
        "not affect what the head learns about them; default: the model's own",
    )
    add_cluster_arguments(parser, port=0)


def run(arguments: argparse.Namespace) -> int:
    """Trains the head. Raises: OutriderError."""
    from outrider.training.plan import TrainingPlan
    from outrider.training.run import train_head  # imports torch

    settings = load_arguments(arguments, sections_of(None))
    given = {name: getattr(arguments, name) for name in PLAN_ARGUMENTS if getattr(arguments, name) is not None}
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
