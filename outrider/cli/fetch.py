"""`outrider fetch`: downloads and verifies the models before anything needs them, and validates all settings.

In a cluster of containers it runs once, before the nodes: one download with visible progress.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from outrider.cli.config import sections_of
from outrider.cli.progress import EventPrinter
from outrider.cluster import ClusterEvent, EventKind
from outrider.config import CONFIG_FILE_VARIABLE, load_config
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.default_model import check_whole_files
from outrider.model_hub.locate import locate_model
from outrider.model_hub.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="ID", help="a directory, a hub id, or the default model")
    parser.add_argument("--config", metavar="FILE", type=Path, help=f"YAML file; default: ${CONFIG_FILE_VARIABLE}")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="one setting; repeatable"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises: ConfigError for a wrong setting of any role; NotFoundError, ModelError."""
    default = os.environ.get(CONFIG_FILE_VARIABLE)
    file = arguments.config or (Path(default) if default else None)
    overrides = [*([f"model.id={arguments.model}"] if arguments.model else []), *arguments.overrides]
    sections = load_config(sections_of(None), file=file, environ=os.environ, overrides=overrides)
    printer = EventPrinter(sys.stderr)
    _fetch(sections["model"], "model", printer)
    draft_node = sections["draft_node"]
    if draft_node.proposer == "draft_model":
        _fetch(draft_node.model, "draft model", printer)
    return 0


def _fetch(config: ModelConfig, name: str, printer: EventPrinter) -> None:
    progress = _shown_by(printer, name)
    location = locate_model(config, progress=progress)
    check_whole_files(location.directory, progress=progress)
    printer.say(f"{name:<10} {location.name} is in {location.directory}")


def _shown_by(printer: EventPrinter, name: str) -> Progress:
    def progress(stage: str, done: int, total: int) -> None:
        printer.show(ClusterEvent(kind=EventKind.PROGRESS, name=name, message=stage, done=done, total=total))

    return progress
