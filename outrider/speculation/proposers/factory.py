"""Makes a proposer by name; what a proposer needs is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.config import setting
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.progress import no_progress
from outrider.speculation.proposers.base import Proposer
from outrider.speculation.proposers.ladder import LadderProposer
from outrider.speculation.proposers.ngram import MAX_NGRAM, MIN_NGRAM, NgramProposer
from outrider.speculation.proposers.suffix import SuffixProposer

PROPOSERS = ("ngram", "suffix", "draft_model")
SECOND_PROPOSERS = ("none", "ngram", "suffix")
"""Those that work on any vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings:
    """What every proposer may need; each takes its own. Part of section `draft_node`.

    Raises: ValueError when `min_ngram` is above `max_ngram`.
    """

    catch_up_tokens_per_step: int = setting(
        512,
        at_least=1,
        at_most=65_536,
        help="The most prefix rows that a draft model computes in one step, shortest first.",
    )
    catch_up_seconds: float = setting(
        0.1,
        above=0,
        at_most=10,
        help="About how long a draft model computes prefixes in one step: other drafts wait for it.",
    )
    max_ngram: int = setting(MAX_NGRAM, at_least=1, at_most=16, help="Longest run of tokens that is looked up.")
    min_ngram: int = setting(MIN_NGRAM, at_least=1, at_most=16, help="Shortest run of tokens that is looked up.")
    remembered_tokens: int = setting(
        0,
        at_least=0,
        at_most=1 << 24,
        help="Past outputs that `suffix` drafts from, of all requests of this node: tokens, 300 bytes each. "
        "0: a request's own text only.",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")


def make_ladder(
    name: str,
    second: str,
    settings: ProposerSettings | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Proposer:
    """The proposer of this name and, unless it is "none", a second one for what the first has nothing for.

    Raises: as `make_proposer`.
    """
    first = make_proposer(name, settings, progress=progress)
    return first if second in ("none", name) else LadderProposer([first, make_proposer(second, settings)])


def make_proposer(
    name: str,
    settings: ProposerSettings | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Proposer:
    """A new proposer. Loads the model of one that has any, which may take long.

    Raises: ConfigError for an unknown name; what `open_model` raises.
    """
    settings = settings or ProposerSettings()
    if name == "ngram":
        return NgramProposer(max_ngram=settings.max_ngram, min_ngram=settings.min_ngram)
    if name == "suffix":
        return SuffixProposer(remembered_tokens=settings.remembered_tokens)
    if name == "draft_model":
        from outrider.engine.step_graphs import GraphShapes
        from outrider.model_hub.kernels import attention_of
        from outrider.model_hub.open import open_model
        from outrider.speculation.proposers.draft_model import DraftModelProposer
        from outrider.speculation.proposers.model_forward import ModelForward

        model = open_model(settings.model, progress=progress or no_progress)
        return DraftModelProposer(
            ModelForward.of(
                model,
                kv_cache=settings.kv_cache,
                attention=attention_of(settings.model, model.device),
                graphs=GraphShapes() if settings.model.cuda_graphs else None,
            ),
            model_name=model.info.name,
            vocabulary_fingerprint=model.info.vocabulary_fingerprint,
            catch_up_tokens_per_step=settings.catch_up_tokens_per_step,
            catch_up_seconds=settings.catch_up_seconds,
            description={
                "dtype": model.info.dtype,
                "numerics": model.info.numerics,
                "kernels": str(model.kernels),
                "weights": model.weights_from,
                "threads": model.num_threads,
            },
        )
    raise ConfigError(f"proposer {name!r} is not one of {', '.join(PROPOSERS)}")
