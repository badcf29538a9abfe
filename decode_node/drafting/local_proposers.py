"""The proposers in the decode node's process: a lookup, the grammar proposer, and a head that reads cached features."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.config import DecodeNodeConfig
from decode_node.drafting.gather import FeaturesOf, log_failed_proposer
from outrider.engine.arrays import Array, ids_like
from outrider.engine.ranks.sharded_cache import KVCache
from outrider.engine.scheduler import EngineSequence
from outrider.errors import ConfigError
from outrider.heads.of_target import TargetHead
from outrider.model_hub.loaded_model import LoadedModel
from outrider.speculation.proposers.factory import NO_PROPOSER, make_proposer
from outrider.speculation.proposers.grammar import GrammarProposer
from outrider.speculation.proposers.head_proposer import HeadTarget, load_head, make_head_proposer
from outrider.speculation.proposers.isolated import IsolatedProposer

CATCH_UP_SECONDS = 0.01
"""Approximate seconds of a step that a head may spend on reading, while all sequences of the node wait for it."""

MAX_CATCH_UP_ROWS = 256
"""Maximum rows that a head reads in one step."""


def open_local_proposers(config: DecodeNodeConfig) -> list[IsolatedProposer]:
    """Opens proposers that need no features: the `decode_node.local_lookup`, if any, and the grammar proposer."""
    name = config.local_lookup
    proposers = [*([] if name == NO_PROPOSER else [make_proposer(name)]), GrammarProposer()]
    return [IsolatedProposer(proposer, on_failure=log_failed_proposer) for proposer in proposers]


@dataclass(slots=True)
class PlaneFeatures:
    """The `Features` of all computed tokens of a sequence on this node. Engine thread only."""

    rows: Array  # the cache's features, [num_slots, width]
    sequence: EngineSequence

    def __len__(self) -> int:
        return self.sequence.num_computed

    def read(self, start: int, end: int) -> Array:
        kv = self.sequence.kv
        assert kv is not None
        slots = [kv.slot(place) for place in range(start, end)]
        if slots == list(range(slots[0], slots[-1] + 1)):
            # Slicing keeps the interpreter's lock. A copy would release the lock, and then wait while the event loop
            # sends the tokens of the last step. The head's kernels, which come next, run in parallel with that.
            return self.rows[slots[0] : slots[-1] + 1]
        return self.rows[ids_like(slots, self.rows)]


def open_local_head(
    config: DecodeNodeConfig, head: TargetHead, model: LoadedModel, kv_cache: KVCache
) -> tuple[IsolatedProposer | None, FeaturesOf | None]:
    """Opens the head's proposer. Returns (None, None) if there is no head or this process does not run it.

    `kv_cache` has the plane of the head's features. Raises: what `load_head` raises, and ConfigError if the head needs
    other features than `model` computes.
    """
    folder = head.folder
    if folder is None or not config.local_head or not config.num_speculative_tokens:
        return None, None
    target = HeadTarget.of(model, cuda_graphs=head.cuda_graphs)
    proposer = make_head_proposer(
        head.packed(model) or load_head(folder, target),
        target,
        max_catch_up_rows=MAX_CATCH_UP_ROWS,
        catch_up_seconds=CATCH_UP_SECONDS,
    )
    assert model.spec.features is not None
    if proposer.info.features != model.info.features:
        raise ConfigError(
            f"head {folder} was replaced while the node started, by one with other features; restart the node"
        )
    plane = model.spec.features
    rows = kv_cache.layers(plane.name)[0].reshape(-1, plane.head_dim)
    return IsolatedProposer(proposer, on_failure=log_failed_proposer), lambda sequence: PlaneFeatures(rows, sequence)
