"""`outrider fetch`: downloads and verifies the models before they are needed, and validates all settings.

In a cluster of containers it runs once, before the nodes, as a single download with visible progress.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from outrider.cli.config import sections_of
from outrider.cluster.event_printer import EventPrinter
from outrider.config.arguments import add_setting_flags, add_settings_arguments, load_arguments
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.default_model import check_file_contents
from outrider.model_hub.locate import locate_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setting_flags(parser, {"model": "model.id"}, {"model": ModelConfig})
    add_settings_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fetches the models. Raises: ConfigError for a wrong setting of any role; NotFoundError, ModelError."""
    sections = load_arguments(arguments, sections_of(None)).sections
    printer = EventPrinter(sys.stderr)
    _fetch(sections["model"], "model", printer)
    draft_node = sections["draft_node"]
    if draft_node.proposer == "draft_model":
        _fetch(draft_node.draft_model(sections["model"]), "draft model", printer)
    return 0


def _fetch(config: ModelConfig, name: str, printer: EventPrinter) -> None:
    progress = partial(printer.progress, name)
    location = locate_model(config, progress=progress)
    check_file_contents(location.directory, progress=progress)
    printer.say(f"{name:<10} {location.name} is in {location.directory}")
