"""Arguments of vLLM's `LLM`: what they are here, or what to do without them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from outrider.config.imports import speculative_settings

_SETTINGS = {
    "revision": "model.revision",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "tensor_parallel_size": "model.tensor_parallel_size",
    "max_num_seqs": "decode_node.max_running_sequences",
    "max_num_batched_tokens": "decode_node.max_rows_per_step",
    "enable_prefix_caching": "kv_cache.prefix_cache",
}


def settings_of(engine_args: Mapping[str, Any], *, model: str) -> list[str]:
    """As `outrider up --set` takes them. None is the default. What only concerns speed may be a warning.

    Raises: TypeError and ConfigError for what has no equivalent.
    """
    others = dict(engine_args)
    settings: list[str] = []
    if "speculative_config" in others:
        imported = speculative_settings(others.pop("speculative_config"), target=model, source="LLM()")
        for warning in imported.warnings:
            warnings.warn(warning, stacklevel=3)
        settings += imported.overrides
    unknown = [name for name in others if name not in _SETTINGS]
    if unknown:
        raise TypeError(
            f"LLM() has no argument {unknown[0]!r}: vLLM's that have an equivalent are speculative_config, "
            f"{', '.join(_SETTINGS)}; other settings go into settings={{'section.name': value}}, see docs/settings.md"
        )
    return settings + [f"{_SETTINGS[name]}={value}" for name, value in others.items() if value is not None]


_RENDER = "render the prompt with get_tokenizer().apply_chat_template and pass its token ids to generate"
_INSTEAD = {
    "priority": "requests of one LLM are equal, and start in their order",
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
