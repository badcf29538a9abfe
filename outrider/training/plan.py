"""The plan of a training run, and the state that it keeps on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cache_directory import locked
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig

FORMS = ("eagle3", "dspark")
ANSWERS, FEATURES, TRAINING = "answers", "features", "training"

ANSWERS_SHARE, FEATURES_SHARE, REPORT_SHARE = 0.25, 0.15, 0.05
"""Maximum fractions of a run's time by phase; training takes the rest. Two cores write as many answers in a quarter of
an hour as they can learn from in half an hour."""

SEED = 1
"""Seed of all random choices of a run."""

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""A function that is called as progress(stage, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The options of one run of `outrider train-head`."""

    out: Path  # the head's folder; the run's own files are in `work`
    model: ModelConfig
    form: str = "eagle3"
    minutes: float = 60.0
    prompts: Path | None = None  # a JSONL file; None: the target writes the prompts
    traffic: Path | None = None  # a folder of kept answers, which are used in place of new ones
    init_from: Path | None = None  # a head to continue from; its feature reduction is not trained
    draft_vocab_size: int = 4096
    num_steps: int = 4  # number of trained draft steps; of a dspark head: the tokens of its block
    num_layers: int = 1  # decoder layers of a dspark head
    rank: int = 64  # rank of a dspark head's Markov head
    answer_tokens: int = 0  # number of answer tokens to write; 0: as many as the time allows
    passes: float = 0.0  # number of passes over the training texts; 0: as many as the time allows
    batch_tokens: int = 1024  # answer tokens in a training step
    learning_rate: float = 1.2e-3
    concurrency: int = 64  # requests at once
    max_answer_tokens: int = 256
    max_length: int = 1024  # maximum tokens of a prompt with its answer; longer texts are left out
    feature_gb: float = 0.0  # maximum size of hidden states on disk; 0: half of what is free
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        if self.form not in FORMS:
            raise ConfigError(f"--form {self.form!r} is not one of {', '.join(FORMS)}")
        if not 0 < self.minutes < 1e6:
            raise ConfigError(f"--minutes {self.minutes:g} is not above 0: give the time that the whole run may take")
        if self.prompts is not None and self.traffic is not None:
            raise ConfigError("--prompts and --from-traffic are both sources of answers: give one of them")
        counts = {
            "--draft-vocab": self.draft_vocab_size,
            "--batch-tokens": self.batch_tokens,
            "--steps": self.num_steps,
            "--layers": self.num_layers,
            "--rank": self.rank,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} {value} is not at least 1")
        amounts = {"--passes": self.passes, "--feature-gb": self.feature_gb, "--answer-tokens": self.answer_tokens}
        for name, amount in amounts.items():
            if not 0 <= amount < 1e12:
                raise ConfigError(f"{name} {amount:g} is not 0 or more")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"--rate {self.learning_rate:g} is not between 0 and 1")
        if self.init_from is not None and self.form != "eagle3":
            raise ConfigError("--init-from continues an eagle3 head: leave --form at eagle3")

    @property
    def work(self) -> Path:
        return self.out / "work"

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    @property
    def feature_bytes(self) -> int:
        """Maximum number of bytes of hidden states on disk."""
        if self.feature_gb:
            return int(self.feature_gb * 1e9)
        own = sum(path.stat().st_size for path in self.work.glob("features/*.bin"))
        return (shutil.disk_usage(self.work).free + own) // 2

    @property
    def measure_seconds(self) -> float:
        """Seconds for each measurement of a step's cost."""
        return min(0.25, self.seconds / 1000)

    @property
    def fixed(self) -> dict[str, Any]:
        """The options that a continued run must not change, because its files depend on them."""
        return {
            "model": self.model.id,
            "revision": self.model.revision,
            "weights": self.model.weights,
            "dtype": self.model.dtype,
            "form": self.form,
            "steps": self.num_steps,
            "layers": self.num_layers,
            "rank": self.rank,
            "prompts": _name(self.prompts),
            "from-traffic": _name(self.traffic),
            "init-from": _name(self.init_from),
            "draft-vocab": self.draft_vocab_size,
        }


@dataclass(slots=True)
class RunState:
    """The progress of a run, kept in state.json in its working folder. A killed run loses a few seconds of it."""

    path: Path
    fixed: Mapping[str, Any]
    seconds: dict[str, float]  # seconds spent, by phase
    done: list[str]  # names of finished phases
    row_seconds: list[list[float]]  # the result of `hidden_states.measure_rows`

    @classmethod
    def open(cls, plan: TrainingPlan) -> RunState:
        """Reads the state of the run in the folder, or makes a new one. Raises: ConfigError if fixed options differ."""
        path = plan.work / "state.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for name, value in plan.fixed.items():
            before = kept.get("fixed", plan.fixed).get(name, value)
            if before != value:
                raise ConfigError(
                    f"{plan.out} holds a run with --{name} {before}, not {value}: "
                    f"repeat the old value to continue it, or give another --out"
                )
        return cls(path, plan.fixed, kept.get("seconds", {}), kept.get("done", []), kept.get("row_seconds", []))

    def write(self) -> None:
        kept = {name: getattr(self, name) for name in ("fixed", "seconds", "done", "row_seconds")}
        write_atomically(self.path, json.dumps(kept, indent=2) + "\n")

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseClock]:
        """Counts the time spent in the block, even if it raises. If it does not raise, marks the phase as done."""
        clock = PhaseClock(self, name, time.monotonic() - self.seconds.get(name, 0.0))
        try:
            yield clock
            self.done = [*(other for other in self.done if other != name), name]
        finally:
            clock.keep()


@dataclass(slots=True)
class PhaseClock:
    """The time that one phase has taken, in all processes that worked on it."""

    state: RunState
    name: str
    began: float  # monotonic time at which the phase would have begun without interruptions

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time spent in the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.began += time.monotonic() - began

    def keep(self) -> None:
        """Saves the time in state.json."""
        self.state.seconds[self.name] = self.seconds
        self.state.write()


@contextmanager
def only_run(plan: TrainingPlan) -> Iterator[None]:
    """Makes the folder and locks it against other runs. Raises: ConfigError."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(plan.work / "lock", while_waiting=lambda: None, seconds=0.0))
        except TimeoutError as error:
            raise ConfigError(
                f"another train-head is running in {plan.out}: wait for its end, or give another --out"
            ) from error
        except OSError as error:
            raise ConfigError(f"--out {plan.out} cannot be written to: {error}") from error
        yield


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically. Readers, even after a kill, see the old or the new content. Raises: OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    fresh.replace(path)


def _name(path: Path | None) -> str:
    return "" if path is None else str(path.resolve())
