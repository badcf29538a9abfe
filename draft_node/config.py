"""Settings of the draft node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.config.settings import setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import SERVICE_SECTIONS
from outrider.speculation.draft_stream import MAX_BRANCHES_PER_SEQUENCE
from outrider.speculation.proposers.factory import LOOKUP_NAMES, PROPOSER_NAMES, PROPOSER_SUMMARY

MAX_ALTERNATIVES = MAX_BRANCHES_PER_SEQUENCE - 1
"""Maximum number of alternative paths per sequence. Together with the main path, they fit into one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNodeConfig:
    """The section `draft_node`."""

    proposer: str = setting("ngram", choices=PROPOSER_NAMES, help=f"What proposes drafts: {PROPOSER_SUMMARY}.")
    model: str = setting("", help="Draft model: a directory or a Hugging Face id. For a head: its folder.")
    remembered_tokens: int = setting(
        0,
        at_least=0,
        at_most=1 << 24,
        help="Number of tokens of past outputs, of all requests of this node, that `suffix` drafts from. Each takes "
        "half a kilobyte. 0: drafts come only from a request's own text.",
    )
    look_ahead: str = setting(
        "auto",
        help="Number of alternative paths of a sequence that a draft model follows while the target verifies: auto "
        f"(as many as there is time for), 1 to {MAX_ALTERNATIVES}, or off (for processors shared with a target "
        "model).",
    )

    def __post_init__(self) -> None:
        is_number = self.look_ahead.isdecimal() and 1 <= int(self.look_ahead) <= MAX_ALTERNATIVES
        if self.look_ahead not in ("off", "auto") and not is_number:
            raise ValueError(f"look_ahead must be off, auto or 1 to {MAX_ALTERNATIVES}, not {self.look_ahead!r}")
        if self.proposer not in LOOKUP_NAMES and not self.model:
            raise ValueError(f"proposer {self.proposer} needs draft_node.model")

    def draft_model(self, model: ModelConfig) -> ModelConfig:
        """Returns the draft model's configuration: the section `model` with `draft_node.model` as id, in one process.

        Its context window is the draft model's own. For a head, the configuration is the target's, since the target's
        weights complete those in the head's folder.
        """
        if self.proposer == "head":
            return replace(model, head=self.model)
        return replace(
            model,
            id=self.model,
            revision="",
            name="",
            head="",
            max_model_len=0,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            expert_parallel_size=1,
            num_redundant_experts=0,
            deterministic=False,
        )

    @property
    def max_alternatives(self) -> int:
        """Number of paths that look-ahead follows for a sequence in addition to the main one; 0 disables it."""
        if self.look_ahead == "off":
            return 0
        return MAX_ALTERNATIVES if self.look_ahead == "auto" else int(self.look_ahead)


SECTIONS = {"model": ModelConfig, "kv_cache": KVCacheConfig, **SERVICE_SECTIONS, "draft_node": DraftNodeConfig}
"""The sections that a draft node reads."""
