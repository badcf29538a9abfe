"""Decode node and drafter around simulated models: everything is the real one but the forward passes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from benchmarks.three_lines.simulated_model import SimulatedKVCache, SimulatedModel, SimulatedRunner, noise_for
from benchmarks.three_lines.speed_model import SpeedModel
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.engine import Engine
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.sampler import Sampler
from outrider.engine.scheduler import Scheduler
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, start_kernels
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.model_forward import ModelForward

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
MAX_MODEL_LEN = 4096
MAX_RUNNING = 64
PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The set times and the acceptance of one comparison."""

    step_seconds: float = 0.030  # of the target, whatever its rows
    token_seconds: float = 0.002  # of a draft token: forward and decision
    acceptance: float = 0.8  # of a draft token after right ones
    num_speculative_tokens: int = 8
    vocab_size: int = 512


@dataclass(frozen=True, slots=True)
class SimulatedPair:
    """Of models with set step times."""

    simulation: Simulation

    @property
    def description(self) -> str:
        simulation = self.simulation
        return (
            f"simulated: target step {1000 * simulation.step_seconds:g} ms, draft token "
            f"{1000 * simulation.token_seconds:g} ms, acceptance {simulation.acceptance:g}, at most "
            f"{simulation.num_speculative_tokens} draft tokens"
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
    def shares_processors(self) -> bool:
        return False

    def engine(self) -> Engine:
        return simulated_engine(self.simulation)

    def proposer(self, *, temperature: float) -> DraftModelProposer:
        return simulated_drafter(self.simulation, noise=self._noise(temperature))

    def drafter_arguments(self, *, temperature: float) -> Sequence[str]:
        return ("simulated", str(self._noise(temperature)), json.dumps(asdict(self.simulation)))

    def speed_model(self, measured: SpeedModel) -> SpeedModel:
        simulation = self.simulation
        return SpeedModel(
            acceptance=simulation.acceptance,
            num_draft_tokens=simulation.num_speculative_tokens,
            step_seconds=simulation.step_seconds,
            token_seconds=simulation.token_seconds,
        )

    def prompts(self, number: int, num_sequences: int) -> list[list[int]]:
        chosen = random.Random(number)  # noqa: S311 prompts, no secret
        return [[chosen.randrange(self.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)]

    def _noise(self, temperature: float) -> float:
        simulation = self.simulation
        return noise_for(simulation.acceptance, temperature=temperature, vocab_size=simulation.vocab_size)


def simulated_engine(simulation: Simulation) -> Engine:
    """Of the target."""
    model = SimulatedModel(simulation.vocab_size)
    cache = SimulatedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    pool = _pool()
    return Engine(
        pool=pool,
        scheduler=Scheduler(pool, max_running=MAX_RUNNING, max_rows_per_step=4096),
        kv_cache=cast("Any", cache),
        runner=cast("Any", SimulatedRunner(model, cache, simulation.step_seconds)),
        sampler=_sampler(simulation),
    )


def simulated_drafter(simulation: Simulation, *, noise: float) -> DraftModelProposer:
    """A proposer whose model has the target's logits with noise."""
    model = SimulatedModel(simulation.vocab_size, noise=noise)
    cache = SimulatedKVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    forward = ModelForward(
        pool=_pool(),
        kv_cache=cast("Any", cache),
        runner=cast("Any", SimulatedRunner(model, cache, simulation.token_seconds, hides_overhead=True)),
        sampler=_sampler(simulation),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=simulation.vocab_size,
    )
    return DraftModelProposer(forward, model_name="simulated", vocabulary_fingerprint="")


def _pool() -> BlockPool:
    return BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hash_seed=b"simulated", enable_prefix_cache=False)


def _sampler(simulation: Simulation) -> Sampler:
    return Sampler(
        vocab_size=simulation.vocab_size,
        known_token_ids=torch.ones(simulation.vocab_size, dtype=torch.bool),
        kernels=_kernels(),
    )


def _kernels() -> CpuKernels | None:
    """Those that decide tokens on this machine, with one thread; None: torch does."""
    config = ModelConfig(num_threads=1)
    choice = choose_model_kernels(config, torch.device("cpu"))
    return start_kernels(choice, config) if choice.library is not None else None
