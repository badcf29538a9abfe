"""A real decode node and drafter with simulated models: only the forward passes are replaced."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any, cast

import numpy as np

from benchmarks.three_lines.simulated_head import (
    FORMAT,
    SimulatedFeaturePlane,
    SimulatedFeatures,
    SimulatedHeadForward,
)
from benchmarks.three_lines.simulated_model import (
    SetTime,
    SimulatedKVCache,
    SimulatedModel,
    SimulatedRunner,
    noise_for,
)
from benchmarks.three_lines.speed_model import SpeedModel, acceptance_of
from decode_node.drafting.feature_plane import FeaturePlane
from decode_node.drafting.gather import FeaturesOf
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.engine import Engine
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.sampler import Sampler
from outrider.engine.scheduler import Scheduler
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, start_kernels
from outrider.node import FeatureFormat
from outrider.speculation.proposers.base import Proposer, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.model_forward import ModelForward

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
MAX_MODEL_LEN = 4096
MAX_RUNNING = 64
PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The fixed times and the acceptance of one comparison."""

    step_seconds: float = 0.030  # duration of the target's step with one row
    row_seconds: float = 0.0  # duration of each further row
    token_seconds: float = 0.002  # duration of one draft token: forward and decision
    acceptance: Sequence[float] = (0.8,)  # rate after accepted tokens, by depth; the last one is for all greater depths
    is_head: bool = False  # a head needs the target's features; tokens drafted beyond them count as deeper
    num_speculative_tokens: int = 8
    vocab_size: int = 512


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """A pair of simulated models with fixed step times."""

    simulation: Simulation

    @property
    def description(self) -> str:
        simulation = self.simulation
        acceptance = ", ".join(f"{each:g}" for each in simulation.acceptance)
        return (
            f"simulated: target step {1000 * simulation.step_seconds:g} ms + {1000 * simulation.row_seconds:g} ms a "
            f"further row, draft token {1000 * simulation.token_seconds:g} ms{' by a head' * simulation.is_head}, "
            f"acceptance {acceptance}, at most {simulation.num_speculative_tokens} draft tokens"
        )

    @property
    def num_speculative_tokens(self) -> int:
        return self.simulation.num_speculative_tokens

    @property
    def vocab_size(self) -> int:
        return self.simulation.vocab_size

    @property
    def vocabulary_fingerprint(self) -> str:
        return ""

    @property
    def max_model_len(self) -> int:
        return MAX_MODEL_LEN

    @property
    def draft_cpus(self) -> Sequence[int]:
        return ()

    @property
    def takes_trees(self) -> bool:
        return False

    def engine(self) -> Engine:
        return simulated_engine(self.simulation)

    @property
    def features(self) -> FeatureFormat | None:
        return FORMAT if self.simulation.is_head else None

    def feature_plane(self, engine: Engine) -> FeaturePlane | None:
        return cast("Any", SimulatedFeaturePlane()) if self.simulation.is_head else None

    def drafter_beside(self, engine: Engine, *, temperature: float) -> tuple[Proposer, FeaturesOf | None]:
        proposer = simulated_drafter(self.simulation, noises=self._noises(temperature))
        return proposer, SimulatedFeatures if self.simulation.is_head else None

    def drafter_arguments(self, *, temperature: float) -> Sequence[str]:
        return ("simulated", json.dumps(self._noises(temperature)), json.dumps(asdict(self.simulation)))

    def speed_model(self, measured: SpeedModel) -> SpeedModel:
        simulation = self.simulation
        most = simulation.num_speculative_tokens
        by_depth = [*simulation.acceptance, *[simulation.acceptance[-1]] * most][:most]
        return SpeedModel(
            acceptance=acceptance_of(1.0 + sum(accumulate(by_depth, mul)), most),
            num_draft_tokens=most,
            step_seconds=simulation.step_seconds,
            token_seconds=simulation.token_seconds,
            verify_seconds=simulation.step_seconds + most * simulation.row_seconds,
        )

    def prompts(self, number: int, num_sequences: int) -> list[list[int]]:
        chosen = random.Random(number)  # noqa: S311 prompts, no secret
        return [[chosen.randrange(self.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)]

    def _noises(self, temperature: float) -> list[float]:
        """Returns the drafter's noise by depth."""
        simulation = self.simulation
        return [
            noise_for(each, temperature=temperature, vocab_size=simulation.vocab_size) for each in simulation.acceptance
        ]


def simulated_engine(simulation: Simulation) -> Engine:
    """Returns an engine of the simulated target."""
    model = SimulatedModel(simulation.vocab_size)
    cache = SimulatedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    pool = _pool()
    return Engine(
        pool=pool,
        scheduler=Scheduler(pool, max_running=MAX_RUNNING, max_rows_per_step=4096),
        kv_cache=cast("Any", cache),
        runner=cast("Any", SimulatedRunner(model, cache, SetTime(simulation.step_seconds, simulation.row_seconds))),
        sampler=_sampler(simulation),
    )


def simulated_drafter(simulation: Simulation, *, noises: Sequence[float]) -> DraftModelProposer:
    """Returns a proposer whose model has the target's logits plus noise; a head's noise depends on the depth."""
    models = [SimulatedModel(simulation.vocab_size, noise=noise) for noise in noises]
    cache = SimulatedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    time = SetTime(simulation.token_seconds, hides_overhead=True)
    if simulation.is_head:
        head = SimulatedHeadForward(_pool(), cache, models, time, _sampler(simulation), MAX_MODEL_LEN)
        return DraftModelProposer(head, ProposerInfo(name="head:simulated", features=FORMAT))
    forward = ModelForward(
        pool=_pool(),
        kv_cache=cast("Any", cache),
        runner=cast("Any", SimulatedRunner(models[0], cache, time)),
        sampler=_sampler(simulation),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=simulation.vocab_size,
    )
    return DraftModelProposer(forward, ProposerInfo(name="draft_model:simulated"))


def _pool() -> BlockPool:
    return BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hash_seed=b"simulated", enable_prefix_cache=False)


def _sampler(simulation: Simulation) -> Sampler:
    return Sampler(
        vocab_size=simulation.vocab_size,
        known_token_ids=np.ones(simulation.vocab_size, dtype=np.bool_),
        kernels=_kernels(),
    )


def _kernels() -> CpuKernels | None:
    """Returns this machine's native kernels with one thread, or None if there are none; torch then decides tokens."""
    config = ModelConfig(num_threads=1)
    choice = choose_model_kernels(config, "cpu")
    return start_kernels(choice, config) if choice.library is not None else None
