"""The package's extras by module. They let clients and routers be installed without the dependencies of nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Never

from outrider.errors import ConfigError

_MODULES = {  # the smallest extra first
    "router": "grpc_reflection jinja2 llguidance opentelemetry prometheus_client structlog tokenizers uvloop xxhash",
    "node": "cryptography gguf numpy psutil safetensors tqdm trustme",
    "torch": "accelerate array_api_compat torch transformers",
    "openai": "smg smg_grpc_proto",
    "store": "valkey",
    "otel": "opentelemetry.exporter opentelemetry.sdk",
    "top": "rich",
    "triton": "triton",
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules.split()}
"""The extra that installs each module."""


def explain_missing(error: ModuleNotFoundError, *, starts_nodes: bool) -> str:
    """Returns a message that says what to install. `starts_nodes`: whether the command needs the dependencies of nodes.

    Raises: the error itself, if no extra installs the module.
    """
    package, *within = (error.name or "").split(".")
    extra = EXTRAS.get(".".join([package, *within[:1]])) or EXTRAS.get(package)
    if extra is None:
        raise error
    extra = "node" if extra == "router" and starts_nodes else extra
    return f"{error.name} is not installed: {install_command(extra)} brings it"


def require(extra: str) -> None:
    """Checks that an extra is installed. Raises: ModuleNotFoundError, for `explain_missing`, if one of its modules is
    missing.
    """
    for module, its in EXTRAS.items():
        if its == extra and find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def run_role(role: str, main: Callable[[], int]) -> Never:
    """Ends the process with the status of `main`.

    If an extra is missing or a setting is invalid, prints one line and ends the process with status 1 or 2.
    """
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        sys.exit(f"{role}: {explain_missing(error, starts_nodes=role != 'router')}")
    except ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        sys.exit(2)


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. If Outrider is installed, pip keeps it and needs no index for it."""
    try:
        distribution("outrider")
    except PackageNotFoundError:  # a source tree that was not installed
        return f"pip install '{Path(__file__).resolve().parents[1]}[{extra}]'"
    return f"pip install 'outrider[{extra}]'"
