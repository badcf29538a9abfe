"""One rank's part of a model. What rank 0 and the others do alike: each collective of one needs the same one of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engine.memory import KVRoom
from outrider.model_hub.config import ModelConfig
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.attention.base import AttentionBackend
    from outrider.model_hub.loaded_model import LoadedModel

START_SECONDS = 600.0
"""For another rank to begin, and to load its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank, which answers None once it has imported what it needs, and joins.

    When it has loaded its shard it says how much memory is for KV, and is told how many blocks to allocate.
    """

    config: ModelConfig
    rank: int
    store: Path  # a file that becomes the process group's store
    block_size: int
    max_rows_per_step: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model, and what it computes attention with."""

    model: LoadedModel
    attention: AttentionBackend
    room: KVRoom  # on its GPU


def open_shard(start: Start, *, progress: Progress = no_progress) -> Shard:
    """Joins the other ranks, and loads as they do. Raises what `load_model` does."""
    from outrider.engine.attention import make_attention_backend
    from outrider.engine.open_runner import rehearse
    from outrider.model_hub.load import load_model
    from outrider.model_hub.tensor_parallel import bound_collectives, join

    join(start.config, start.rank, start.store, timeout_seconds=start.timeout_seconds)
    model = load_model(start.config, progress=progress)
    heads = {"num_heads": model.spec.num_heads, "num_kv_heads": model.spec.num_kv_heads}
    attention = make_attention_backend(start.config.attention, model.device, model.spec.dtype, **heads)
    reserved = rehearse(model, attention, num_rows=start.max_rows_per_step, block_size=start.block_size)
    assert model.model is not None
    bound_collectives(model.model, timeout_seconds=start.timeout_seconds)
    return Shard(model, attention, KVRoom.of(model.device, reserved))
