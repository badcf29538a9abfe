"""One rank's part of a model. All ranks run this code alike, since a collective needs all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engine.memory import KVMemory
from outrider.model_hub.config import ModelConfig
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from outrider.engine.attention.base import AttentionBackend
    from outrider.model_hub.loaded_model import LoadedModel

START_SECONDS = 600.0
"""Maximum seconds that another rank may take to start, and then to load its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank. The rank answers None once it has imported what it needs, then joins the others.

    After loading its shard, the rank sends the memory available for KV, and receives the number of blocks to allocate.
    """

    config: ModelConfig
    rank: int
    store: Path  # the file of the process group's store
    block_size: int
    max_rows_per_step: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the model, and its attention backend."""

    model: LoadedModel
    attention: AttentionBackend
    room: KVMemory  # memory available for KV on the rank's device


def open_shard(start: Start, *, progress: Progress = no_progress) -> Shard:
    """Joins the other ranks and loads this rank's shard. Raises: what `load_model` raises."""
    from outrider.engine.attention import make_attention_backend
    from outrider.engine.open_runner import profile_run
    from outrider.model_hub.load import load_model
    from outrider.model_hub.tensor_parallel import join, set_collective_timeout

    join(start.config, start.rank, start.store, timeout_seconds=start.timeout_seconds)
    model = load_model(start.config, progress=progress)
    shape = model.spec.attention_shape
    attention = make_attention_backend(start.config.attention, model.device, model.spec.dtype, **shape)
    reserved = profile_run(model, attention, num_rows=start.max_rows_per_step, block_size=start.block_size)
    assert model.model is not None
    set_collective_timeout(model.model, timeout_seconds=start.timeout_seconds)
    return Shard(model, attention, KVMemory.of(model.device, reserved))
