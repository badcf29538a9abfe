"""Outrider serves a large language model as four gRPC services.

Importing this package loads neither torch nor gRPC. Clients start at `outrider.client`; scripts that generate in
their own processes start at `LLM`.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_OFFLINE = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "TokensPrompt": "prompts",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "LoRARequest": "adapters",
}
"""Names, each with the module of `outrider.llm` that defines it and is imported when the name is first used. See
`__init__.pyi`.
"""


def __getattr__(name: str) -> object:
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"outrider.llm.{_OFFLINE[name]}"), name)
    except ModuleNotFoundError as error:
        from outrider.extras import explain_missing

        missing = f"outrider.{name} starts nodes, and {explain_missing(error, starts_nodes=True)}"
        raise ImportError(missing, name=error.name) from error
