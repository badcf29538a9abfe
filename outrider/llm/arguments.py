"""Arguments of vLLM's `generate` and `chat` that are not here, and what to do without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
