"""Sampling parameters with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # gRPC is not imported before an LLM is used
    from outrider.client.options import GenerateOptions

_OPTIONS = {"logprobs": "top_logprobs", "include_stop_str_in_output": "include_match"}
"""The names of the client's options, by field, where they differ from the field's name."""
_CONVERTED = ("detokenize", "structured_outputs", "guided_decoding")


def unsupported(default: Any, instead: str) -> Any:
    """Declares one of vLLM's fields that is accepted only with its default. `instead` says what to do instead."""
    return field(default=default, metadata={"instead": instead})


def check_supported(params: StructuredOutputsParams | SamplingParams) -> None:
    """Checks that unsupported fields have their defaults. Raises: ValueError that names a field with another value."""
    for item in fields(params):
        value = getattr(params, item.name)
        if "instead" in item.metadata and value not in (item.default, None, []):
            name = f"{type(params).__name__}.{item.name}"
            raise ValueError(f"{name}={value!r} is not supported: {item.metadata['instead']}")


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output. Exactly one of the first five fields must be set."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark-style, in llguidance's syntax
    json_object: bool | None = None  # any JSON object
    structural_tag: str | None = unsupported(None, "write a grammar")
    whitespace_pattern: str | None = unsupported(None, "write a grammar")
    disable_any_whitespace: bool = False  # JSON is compact in either case
    disable_additional_properties: bool = unsupported(False, "set additionalProperties in the schema")

    def __post_init__(self) -> None:
        check_supported(self)
        kinds = (self.json, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("structured outputs need exactly one of json, regex, choice, grammar and json_object")

    def to_options(self) -> GenerateOptions:
        """Returns the client's option for the constraint."""
        values = {
            "json_schema": {"type": "object"} if self.json_object else self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        return cast("GenerateOptions", {name: value for name, value in values.items() if value is not None})


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Parameters that determine how tokens are chosen and where an answer ends.

    Raises: ValueError if a field has no equivalent. `LLM.generate` raises ValueError for values that are out of range,
    which the router checks (router.proto).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 keeps the whole vocabulary
    min_p: float = 0.0
    seed: int | None = None  # None: drawn from the LLM's seed
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: the rest of the window; the window ends an answer in any case
    min_tokens: int = 0
    logprobs: int | None = None  # 0 to 20 alternatives in addition to the token itself
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None  # the older name of `structured_outputs`
    best_of: int | None = unsupported(None, "generate n samples and choose by cumulative_logprob")
    bad_words: Sequence[str] | None = unsupported(None, "use logit_bias or structured_outputs")
    allowed_token_ids: Sequence[int] | None = unsupported(None, "use structured_outputs")
    logprob_token_ids: Sequence[int] | None = unsupported(None, "use logprobs")
    flat_logprobs: bool = unsupported(False, "logprobs are dicts")
    logits_processors: Sequence[Any] | None = unsupported(None, "use logit_bias or structured_outputs")
    truncate_prompt_tokens: int | None = unsupported(None, "pass a part of prompt_token_ids")
    spaces_between_special_tokens: bool = unsupported(True, "decode token_ids with get_tokenizer()")
    thinking_token_budget: int | None = unsupported(None, "use max_tokens")
    extra_args: Mapping[str, Any] | None = unsupported(None, "there are no plug-ins")

    def __post_init__(self) -> None:
        check_supported(self)

    def to_options(self) -> GenerateOptions:
        """Returns the client's options. Raises: ValueError if a field is not supported."""
        check_supported(self)  # once more, because fields may have been assigned since
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be 0 to 20: logprobs of the whole vocabulary are not supported")
        taken = [item.name for item in fields(self) if "instead" not in item.metadata and item.name not in _CONVERTED]
        values = {_OPTIONS.get(name, name): getattr(self, name) for name in taken}
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        values["token_ids_only"] = not self.detokenize
        options = cast("GenerateOptions", {name: value for name, value in values.items() if value is not None})
        constraint = self.structured_outputs or self.guided_decoding
        return options if constraint is None else {**options, **constraint.to_options()}
