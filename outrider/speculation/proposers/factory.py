"""The list of proposers: names, requirements and constructors.

Settings, `--draft` and help texts take their choices from here, even in a client-only installation. So a proposer's
module is imported only when the proposer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError
from outrider.heads.locate import head_folder
from outrider.model_hub.config import ModelConfig
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.speculation.proposers.base import Proposer

NO_PROPOSER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings:
    """The settings of all proposers; each reads its own."""

    remembered_tokens: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)  # for a head: the target, with `model.head`
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    other_memory_bytes: int = 0  # main memory that a model's cache must leave free for the rest of the node


def _make_ngram(_settings: ProposerSettings, _progress: Progress) -> Proposer:
    from outrider.speculation.proposers.ngram import NgramProposer

    return NgramProposer()


def _make_suffix(settings: ProposerSettings, _progress: Progress) -> Proposer:
    from outrider.speculation.proposers.suffix import SuffixProposer

    return SuffixProposer(remembered_tokens=settings.remembered_tokens)


def _make_draft_model(settings: ProposerSettings, progress: Progress) -> Proposer:
    from outrider.speculation.proposers.model_forward import open_draft_model

    return open_draft_model(
        settings.model, settings.kv_cache, main_memory_bytes=settings.other_memory_bytes, progress=progress
    )


def _make_head(settings: ProposerSettings, progress: Progress) -> Proposer:
    from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, make_head_proposer

    folder = head_folder(settings.model)
    if folder is None:
        raise ConfigError(f"the model {settings.model.id} has no built-in head: give a head's folder")
    target = HeadTarget.locate(settings.model, progress=progress)
    return make_head_proposer(load_head(folder, target), target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerKind:
    """An entry of `PROPOSERS`."""

    name: str
    summary: str
    make: Callable[[ProposerSettings, Progress], Proposer]
    needs: str = ""  # "MODEL" or "DIR"; empty: it needs no model and works on any vocabulary


PROPOSERS = (
    ProposerKind(name="ngram", summary="prompt lookup", make=_make_ngram),
    ProposerKind(name="suffix", summary="what most often followed", make=_make_suffix),
    ProposerKind(name="draft_model", summary="a smaller model", make=_make_draft_model, needs="MODEL"),
    ProposerKind(name="head", summary="a drafter head of the model", make=_make_head, needs="DIR"),
)

PROPOSER_NAMES = tuple(kind.name for kind in PROPOSERS)
LOOKUP_NAMES = tuple(kind.name for kind in PROPOSERS if not kind.needs)
"""The proposers without a model."""

PROPOSER_SUMMARY = ", ".join(f"{kind.name} ({kind.summary})" for kind in PROPOSERS)
DRAFT_CHOICES = (*(":".join(filter(None, (kind.name, kind.needs))) for kind in PROPOSERS), NO_PROPOSER)
"""Values of `--draft`. MODEL is a path or a hub id; DIR is a head's folder, or "auto" for the default model's head."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A parsed value of `--draft`."""

    proposer: str = NO_PROPOSER
    model_id: str = ""  # the model of a draft_model, or the folder of a head


def parse_draft_choice(text: str) -> DraftChoice:
    """Parses one of `DRAFT_CHOICES`. Raises: ValueError, which lists them."""
    name, _, model_id = text.partition(":")
    kind = next((kind for kind in PROPOSERS if kind.name == name), None)
    if text != NO_PROPOSER and (kind is None or bool(kind.needs) is not bool(model_id.strip())):
        raise ValueError(f"draft must be one of {', '.join(DRAFT_CHOICES)}, not {text!r}")
    return DraftChoice(name, model_id)


def make_proposer(name: str, settings: ProposerSettings | None = None, *, progress: Progress = no_progress) -> Proposer:
    """Returns a new proposer. If the proposer needs a model, loads the model, which may take long.

    Raises: ConfigError for an unknown name; the errors of `open_model`.
    """
    for kind in PROPOSERS:
        if kind.name == name:
            return kind.make(settings or ProposerSettings(), progress)
    raise ConfigError(f"proposer {name!r} is not one of {', '.join(PROPOSER_NAMES)}")
