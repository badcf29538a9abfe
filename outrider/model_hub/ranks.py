"""Starts the ranks of a node with several processes: this process is rank 0, the others are its children."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from outrider.engine.arrays import Array, namespace
from outrider.engine.device import device_type
from outrider.engine.gpu_turns import loading_turn
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.memory import KVMemory, PoolSize, pool_size
from outrider.engine.model_runner import warm_up
from outrider.engine.model_spec import ModelSpec
from outrider.engine.processor import usable_cpus, within_quota
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.commands import Step
from outrider.engine.ranks.group import Member, RankGroup
from outrider.engine.ranks.sharded_cache import DividedKVCache, ShardedKVCache
from outrider.engine.runner_base import ModelRunner
from outrider.engine.stages import Stage, cut_batch, num_micro_batches
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.loaded_model import LoadedModel, ReductionOf
from outrider.model_hub.locate import locate_model
from outrider.model_hub.pipeline import check_pipeline
from outrider.model_hub.shard import START_SECONDS, Shard, Start, open_shard
from outrider.model_hub.tensor_parallel import check_tensor_parallel, device_of_rank
from outrider.own_modules import kill_with_parent, module_command
from outrider.progress import Progress, no_progress

TIMEOUT_SECONDS = 60.0
"""Seconds that a collective or a message may take. Ranks do the same work at the same time, so no rank waits long."""
STAGE_TIMEOUT_SECONDS = 600.0
"""Seconds that a message may take in a pipeline, where a stage waits for all layers of the stage before it."""


OVERHEAD_ROWS = {"cpu": 12, "amx": 80, "cuda": 256}
"""Number of rows whose products take about as long as reading the weights (see `num_micro_batches`), by kernels or
device type. Measured with avx512_bf16; the numbers for AMX and GPUs are estimates."""


class LeadingRunner(ModelRunner):
    """The runner of rank 0's shard, which sends each batch to the other ranks. Steps are not captured as graphs.

    In a pipeline it cuts a batch into parts, so that a stage computes one part while the next computes another.
    """

    def __init__(self, shard: Shard, runner: ModelRunner, ranks: RankGroup) -> None:
        """`runner`: computes rank 0's part."""
        self.attention_name, self.phases = runner.attention_name, runner.phases
        self.can_be_traced, self.is_asynchronous = runner.can_be_traced, runner.is_asynchronous
        self._runner = runner
        self._ranks = ranks
        self._is_pipeline = shard.model.stage is not None
        kind = device_type(shard.model.device)
        self._overhead_rows = OVERHEAD_ROWS.get(shard.model.kernels.path, OVERHEAD_ROWS[kind])

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Implements ModelRunner.forward. Raises: RankLostError if another rank is gone."""

        def layer_done(layer: int) -> None:
            self._ranks.layer_done(layer)
            if on_layer_done is not None:
                on_layer_done(layer)

        parts: tuple[InputBatch, ...] = (batch,)
        if self._is_pipeline:
            num_parts = num_micro_batches(batch.num_rows, self._ranks.size, overhead_rows=self._overhead_rows)
            parts = cut_batch(batch, num_parts)
        with self._ranks.running(Step(parts, reports_layers=on_layer_done is not None)):
            logits = [self._runner.forward(part) for part in parts[:-1]]
            logits.append(self._runner.forward(parts[-1], on_layer_done=None if on_layer_done is None else layer_done))
        return logits[0] if len(logits) == 1 else namespace(logits[0]).concat(logits)

    def prepare_ahead(self, batch: InputBatch) -> InputBatch:
        """Implements ModelRunner.prepare_ahead."""
        return self._runner.prepare_ahead(batch)


def open_ranks(
    config: ModelConfig,
    kv_cache: KVCacheConfig,
    *,
    max_rows_per_step: int,
    features: ReductionOf | None = None,
    on_rank_lost: Callable[[RankLostError], None],
    progress: Progress = no_progress,
    timeout_seconds: float | None = None,
) -> tuple[LoadedModel, ShardedKVCache, ModelRunner, RankGroup]:
    """Opens rank 0's part of `open_model_runtime`'s result, for two or more ranks. A process has one group at a time.

    Rank 0 alone makes `features`, since each rank has whole hidden states; the others have no plane for them. The other
    ranks end with the calling thread (see `outrider.own_modules.kill_with_parent`).
    """
    config, usual_timeout = _checked(config, locate_model(config, progress=progress).directory)
    timeout_seconds = timeout_seconds or usual_timeout
    release = ExitStack()
    folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
    release.callback(folder.cleanup)

    def rank_lost(loss: RankLostError) -> None:
        folder.cleanup()  # `on_rank_lost` may end the process immediately
        on_rank_lost(loss)

    start = Start(
        config=config,
        rank=0,
        store=Path(folder.name, "store"),
        block_size=kv_cache.block_size,
        max_rows_per_step=max_rows_per_step,
        timeout_seconds=timeout_seconds,
    )
    # Twice the time, because a KV request may first wait for a step on the other side.
    ranks = RankGroup(answer_seconds=2 * timeout_seconds, on_lost=rank_lost, release=release.close)
    devices = [device_of_rank(config, rank) for rank in range(config.num_ranks)]
    turn = ExitStack()
    try:
        turn.enter_context(loading_turn(devices, progress))
        for rank in range(1, config.num_ranks):
            ranks.add(_spawn(rank, timeout_seconds=timeout_seconds))
        for member in ranks.members:
            member.commands.send(replace(start, rank=member.rank))
        _receive(ranks.members)
        release.callback(_leave_process_group)
        shard = open_shard(start, progress=progress)
        reduction = None if features is None else features(shard.model)
        if reduction is not None and shard.is_data_parallel:
            raise ConfigError("model.head does not go with model.expert_parallel_size: set it empty")
        if reduction is not None and shard.model.stage is not None and shard.model.model is not None:
            raise ConfigError("model.head needs a native decoder with model.pipeline_parallel_size: set it empty")
        taps = () if reduction is None else reduction.taps
        shard = replace(shard, model=shard.model.with_features(reduction))
        rooms = [shard.room, *_receive(ranks.members)]
        size = _pool_size(
            shard.model,
            kv_cache,
            rooms,
            may_shorten=not config.max_model_len,
            max_step_tokens=max_rows_per_step,
        )
        shard = replace(shard, model=shard.model.with_window(size.max_model_len))
        for member in ranks.members:
            member.commands.send((size, taps))
        local = shard.model.make_cache(size.num_blocks, kv_cache.block_size, size.window_blocks)
        cache, runner = _joined(shard, local, shard.make_runner(local, taps, reduction), ranks)
        warm_up(runner, cache.local, shard.model.spec.max_model_len)
    except Exception as error:
        try:
            if _may_be_a_loss(error):
                ranks.raise_if_lost(error)
        finally:
            ranks.close()
        raise
    finally:
        turn.close()
    return shard.model, cache, runner, ranks


def _joined(
    shard: Shard, local: PagedKVCache, own: ModelRunner, ranks: RankGroup
) -> tuple[ShardedKVCache, ModelRunner]:
    """Returns the cache and the runner of all ranks together. `local`, `own`: those of rank 0."""
    if shard.is_data_parallel:
        from outrider.engine.data_parallel import DataParallelRunner, LeadingDataRunner

        assert isinstance(own, DataParallelRunner)
        return DividedKVCache(local, ranks), LeadingDataRunner(own, ranks, blocks_per_rank=local.num_blocks)
    stage = shard.model.stage
    parts = () if stage is None else (_whole(shard.model.spec, stage), stage.layers_by_rank)
    return ShardedKVCache(local, ranks, *parts), LeadingRunner(shard, own, ranks)


def _checked(config: ModelConfig, directory: Path) -> tuple[ModelConfig, float]:
    """Returns the settings for each rank, and the timeout of messages in seconds. Raises: ConfigError."""
    if config.pipeline_parallel_size > 1 and config.expert_parallel_size == 1:
        check_pipeline(config, directory)
    else:
        from outrider.model_hub.expert_parallel import check_expert_parallel  # imports transformers
        from outrider.model_hub.load import read_config

        check = check_expert_parallel if config.expert_parallel_size > 1 else check_tensor_parallel
        check(config, read_config(directory))
    if config.tensor_parallel_size > 1:
        return config, TIMEOUT_SECONDS
    num_threads = config.num_threads or max(len(within_quota(usable_cpus())) // config.num_ranks, 1)
    timeout_seconds = STAGE_TIMEOUT_SECONDS if config.pipeline_parallel_size > 1 else TIMEOUT_SECONDS
    return replace(config, num_threads=num_threads), timeout_seconds


def _pool_size(
    model: LoadedModel,
    kv_cache: KVCacheConfig,
    rooms: Sequence[KVMemory],
    *,
    may_shorten: bool,
    max_step_tokens: int,
) -> PoolSize:
    """Returns the `pool_size` of each rank's cache. A configured size in bytes is for the caches of all ranks together.

    Ranks on a CPU share its memory. On GPUs, the rank with the least room decides. All ranks are sized like
    rank 0 with as many layers as any rank has. It needs the most, because it stores all features in addition to its KV.
    """
    spec, (num_bytes, fraction) = model.spec, kv_cache.size
    is_shared = num_bytes is not None or device_type(model.device) == "cpu"
    if model.stage is not None:
        spec = _whole(spec, model.stage)
        if not is_shared:
            spec = spec.of_layers(max(model.stage.layers_by_rank, key=len))
    elif is_shared:
        num_ranks = len(rooms)
        spec = replace(spec, num_heads=spec.num_heads * num_ranks, num_kv_heads=spec.num_kv_heads * num_ranks)
    room = min(rooms, key=lambda room: room.share(fraction))
    return pool_size(spec, kv_cache, room, may_shorten=may_shorten, max_step_tokens=max_step_tokens)


def _whole(spec: ModelSpec, stage: Stage) -> ModelSpec:
    """Returns the specification of the whole model of a stage."""
    return replace(spec, num_layers=stage.num_layers, windows=spec.model_windows)


def _may_be_a_loss(error: Exception) -> bool:
    """Returns whether a lost rank may have caused an error. Errors of settings or the model occur in all ranks."""
    return isinstance(error, RankLostError | RuntimeError) or isinstance(error.__cause__, RuntimeError)


def _spawn(rank: int, *, timeout_seconds: float) -> Member:
    """Starts a process that waits for its `Start`."""
    ours, theirs = zip(*[socket.socketpair() for _ in range(3)], strict=True)
    descriptors = [end.fileno() for end in theirs]
    process = subprocess.Popen(  # noqa: S603 this interpreter, and our own module
        kill_with_parent([*module_command("outrider.model_hub.rank_process"), *map(str, descriptors)]),
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
    )
    for end in theirs:
        end.close()
    commands, kv = (Channel(end, peer=f"rank {rank}", timeout_seconds=timeout_seconds) for end in ours[:2])
    ours[2].settimeout(timeout_seconds)
    return Member(rank, process, commands, kv, ours[2])


def _receive(members: Sequence[Member]) -> list[Any]:
    """Receives one message from each rank: see `Start`."""
    return [member.commands.receive(begins_within_seconds=START_SECONDS) for member in members]


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
