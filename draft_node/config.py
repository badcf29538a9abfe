"""Settings of the draft node."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import setting
from outrider.service.config import ServerConfig
from outrider.speculation.proposers.factory import PROPOSERS, ProposerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNodeConfig(ProposerSettings):
    """Section `draft_node`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    proposer: str = setting("ngram", choices=PROPOSERS, help="Who guesses: prompt lookup, or a smaller model.")
    num_speculative_tokens: int = setting(
        5, at_least=1, at_most=32, help="The most draft tokens that may be asked for; some to spare come on top."
    )
    max_sequences: int = setting(512, at_least=1, at_most=65_536, help="Sequences held, of all decode nodes together.")
