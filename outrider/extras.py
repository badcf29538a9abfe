"""Which of the package's extras brings a module: clients and routers install without what nodes need."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_MODULES = {  # the smallest extra first
    "router": "grpc_reflection jinja2 llguidance prometheus_client structlog tokenizers uvloop xxhash",
    "node": "cryptography gguf numpy psutil safetensors tqdm trustme",
    "torch": "accelerate array_api_compat torch transformers",
    "openai": "smg smg_grpc_proto",
    "store": "valkey",
    "otel": "opentelemetry",
    "top": "rich",
    "triton": "triton",
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules.split()}
"""By module, the extra that brings it."""


def extra_of(module: str | None) -> str | None:
    """None: no extra brings it."""
    return EXTRAS.get((module or "").partition(".")[0])


def install_command(extra: str) -> str:
    """What installs an extra here. Pip does not look again for an Outrider that is installed: no index need have it."""
    try:
        distribution("outrider")
    except PackageNotFoundError:  # a source tree that is run as it lies there
        return f"pip install '{Path(__file__).resolve().parents[1]}[{extra}]'"
    return f"pip install 'outrider[{extra}]'"
