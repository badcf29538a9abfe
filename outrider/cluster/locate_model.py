"""`python -m outrider.cluster.locate_model`: downloads and converts the model once, with progress, before nodes start.

A separate process does this because the conversion of the default model takes half a gigabyte of memory, which is freed
when the process ends.
"""

from __future__ import annotations

import os
import sys

from outrider.config.arguments import parse_role_arguments
from outrider.lossy_stream import guard_standard_streams
from outrider.service.announce import announce_progress, announce_uncaught_errors
from outrider.service.config import TelemetryConfig
from outrider.service.telemetry.logging import configure_logging


def main() -> int:
    guard_standard_streams()
    from outrider.model_hub.config import ModelConfig
    from outrider.model_hub.locate import locate_model

    sections = parse_role_arguments(
        "outrider.cluster.locate_model", {"model": ModelConfig, "telemetry": TelemetryConfig}
    )
    configure_logging(sections["telemetry"], role="model")
    announce_uncaught_errors()
    location = locate_model(sections["model"], progress=announce_progress)
    sys.stderr.write(f"{location.name}: {os.fspath(location.directory)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
