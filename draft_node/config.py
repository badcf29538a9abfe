"""Settings of the draft node."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.config import setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import ServerConfig
from outrider.speculation.proposers.factory import PROPOSERS, ProposerSettings
from outrider.speculation.proposers.ngram import MAX_NGRAM, MIN_NGRAM


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNodeConfig:
    """Section `draft_node`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    proposer: str = setting("ngram", choices=PROPOSERS, help="Who guesses: prompt lookup, or a smaller model.")
    num_speculative_tokens: int = setting(
        5, at_least=1, at_most=32, help="The most draft tokens that may be asked for; some to spare come on top."
    )
    max_sequences: int = setting(512, at_least=1, at_most=65_536, help="Sequences held, of all decode nodes together.")
    catch_up_tokens_per_step: int = setting(
        512, at_least=1, at_most=65_536, help="Prefix rows that a draft model computes in one step, shortest first."
    )
    max_ngram: int = setting(MAX_NGRAM, at_least=1, at_most=16, help="Longest run of tokens that is looked up.")
    min_ngram: int = setting(MIN_NGRAM, at_least=1, at_most=16, help="Shortest run of tokens that is looked up.")
    model: ModelConfig = field(default_factory=ModelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")

    @property
    def proposer_settings(self) -> ProposerSettings:
        return ProposerSettings(
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            model=self.model,
            kv_cache=self.kv_cache,
            catch_up_tokens_per_step=self.catch_up_tokens_per_step,
        )
