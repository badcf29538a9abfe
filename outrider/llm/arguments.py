"""Arguments of vLLM's `LLM`: what they are here, or what to do without them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from outrider.config.imports import vllm_settings

_UNSET_MEMORY = (0.9, 0.92)
"""Defaults of vLLM's `gpu_memory_utilization`, which leave ours in force."""


def settings_of(engine_args: Mapping[str, Any], *, model: str) -> list[str]:
    """As `outrider up --set` takes them. What concerns speed only, and has no equivalent, is a warning.

    Raises: ConfigError for another argument without an equivalent.
    """
    given = dict(engine_args)
    if given.get("gpu_memory_utilization") in _UNSET_MEMORY:
        del given["gpu_memory_utilization"]
    imported = vllm_settings(given, target=model, source="LLM()")
    for warning in imported.warnings:
        warnings.warn(warning, stacklevel=3)
    return imported.overrides


_RENDER = "render the prompt with get_tokenizer().apply_chat_template and pass its token ids to generate"
_INSTEAD = {
    "priority": "requests of one LLM are equal, and start in their order",
    "prompt_token_ids": "pass token ids as prompts",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "lora_request": "merge the adapter into the model",
    "tokenization_kwargs": "encode with get_tokenizer() and pass token ids",
    "mm_processor_kwargs": "prompts are text",
    "chat_template": _RENDER,
    "chat_template_kwargs": _RENDER,
    "chat_template_content_format": "contents are sent to the template as text",
    "continue_final_message": _RENDER,
    "tools": _RENDER,
}
"""By argument of vLLM's `generate` and `chat`, what to do without it."""


def check_arguments(method: str, arguments: Mapping[str, Any]) -> None:
    """What vLLM has and we have not passes at its default only. Raises: TypeError, ValueError."""
    for name, value in arguments.items():
        if name not in _INSTEAD:
            raise TypeError(f"LLM.{method}() has no argument {name!r}")
        if value not in (None, False, "auto"):
            raise ValueError(f"LLM.{method}({name}={value!r}) is not supported: {_INSTEAD[name]}")
