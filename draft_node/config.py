"""Settings of the draft node."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import setting
from outrider.service.config import ServerConfig
from outrider.speculation.draft_stream import MAX_BRANCHES_PER_SEQUENCE
from outrider.speculation.proposers.factory import PROPOSERS, SECOND_PROPOSERS, ProposerSettings

MAX_ALTERNATIVES = MAX_BRANCHES_PER_SEQUENCE - 1
"""All of them and the main path fit one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNodeConfig(ProposerSettings):
    """Section `draft_node`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    proposer: str = setting(
        "ngram", choices=PROPOSERS, help="Who guesses: prompt lookup, what most often followed, or a smaller model."
    )
    second_proposer: str = setting(
        "none", choices=SECOND_PROPOSERS, help="Who guesses for a sequence for which the first has nothing."
    )
    num_speculative_tokens: int = setting(
        5, at_least=1, at_most=32, help="The most draft tokens that may be asked for; some to spare come on top."
    )
    look_ahead: str = setting(
        "auto",
        help="Alternatives of a sequence that a draft model follows while the target verifies: off, auto, or "
        f"1 to {MAX_ALTERNATIVES}. auto: as many as its time allows; off where processors are shared with the target.",
    )
    shares_processors: bool = setting(False, help="Whether target models compute on this node's processors.")
    max_sequences: int = setting(512, at_least=1, at_most=65_536, help="Sequences held, of all decode nodes together.")

    def __post_init__(self) -> None:
        ProposerSettings.__post_init__(self)
        is_number = self.look_ahead.isdecimal() and 1 <= int(self.look_ahead) <= MAX_ALTERNATIVES
        if self.look_ahead not in ("off", "auto") and not is_number:
            raise ValueError(f"look_ahead {self.look_ahead!r} is not off, auto or 1 to {MAX_ALTERNATIVES}")

    @property
    def max_alternatives(self) -> int:
        """Paths beside the main one that a look-ahead follows for a sequence; 0: there is no look-ahead."""
        if self.look_ahead == "off" or (self.look_ahead == "auto" and self.shares_processors):
            return 0
        return MAX_ALTERNATIVES if self.look_ahead == "auto" else int(self.look_ahead)
