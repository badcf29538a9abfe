"""Opens models as nodes do, for stages that run steps themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.gpu_stages.day import WINDOW, Day
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.open_runner import open_runner
from outrider.engine.runner_base import ModelRunner
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_attention
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.open import open_model

ALL_STEPS = GraphShapes()


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """A model with its own KV cache."""

    loaded: LoadedModel
    cache: PagedKVCache
    runner: ModelRunner

    def forward(self, rows: Sequence[SequenceRows]) -> Any:
        """Returns logits, which the next forward overwrites."""
        return self.runner.forward(build_input_batch(rows, self.cache.block_size))

    def fill(self) -> None:
        """Fills the cache with random keys and values, since zeros would make a GPU faster than it is."""
        for plane in self.loaded.spec.planes:
            for layer in self.cache.layers(plane.name):
                layer.normal_()


def open_engine(
    day: Day,
    model: Path | str,
    *,
    num_blocks: int,
    graphs: GraphShapes | None = ALL_STEPS,
    deterministic: bool = False,
    num_rows: int = 256,
    loaded: LoadedModel | None = None,
) -> OpenEngine:
    """Opens a model. `num_rows`: rows of the largest step. `loaded`: an earlier call's model for the same arguments.

    On a CPU, torch computes the model, except in deterministic mode, which only the native kernels support there.
    """
    config = ModelConfig(
        id=str(model),
        device=day.device,
        dtype="bfloat16",
        deterministic=deterministic,
        max_model_len=0 if day.model else WINDOW,
        kernels="auto" if day.is_gpu or deterministic else "torch",
        keep_packed=False,
    )
    loaded = open_model(config) if loaded is None else loaded
    cache, runner, _ = open_runner(
        loaded,
        choose_attention(config, loaded.device),
        KVCacheConfig(num_blocks=num_blocks),
        num_rows=num_rows,
        graphs=graphs,
    )
    if day.is_gpu:  # failures here, whereas a node would only warn
        day.expect(f"the decoder is fused, not {loaded.kernels}", loaded.fused is not None)
        day.expect("steps are captured as graphs", bool(runner.padded_rows) == (graphs is not None))
    return OpenEngine(loaded, cache, runner)


def tables(num_seqs: int, num_tokens: int, block_size: int) -> Iterator[range]:
    """Returns contiguous block tables for sequences of `num_tokens` tokens."""
    num_blocks = -(-num_tokens // block_size)
    return (range(seq * num_blocks, (seq + 1) * num_blocks) for seq in range(num_seqs))
