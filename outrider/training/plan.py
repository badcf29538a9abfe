"""The plan of a training run, and the state that it keeps on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider.cache_directory import locked
from outrider.config.settings import Limits
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig

FORMS = ("eagle3", "dspark")
FIXED = ("form", "num_steps", "num_layers", "rank", "prompts", "traffic", "init_from", "draft_vocab_size")
FIXED_OF_MODEL = ("revision", "weights", "dtype")

SEED = 1
"""Seed of all random choices of a run."""

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""A function that is called as progress(stage, done, total)."""


def option(default: Any, flag: str, text: str, **limits: Any) -> Any:
    """Returns a field that the command line sets by `flag`, e.g. "--minutes N". `text`: its help; `limits`: of Limits.

    The field is a path if `default` is None, and otherwise has the default's type.
    """
    name, metavar = flag.split()
    argument = {"metavar": metavar, "type": Path if default is None else type(default), "help": text}
    return field(default=default, metadata={"flag": name, "argument": argument, "limits": Limits(**limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The options of one run of `outrider train-head`. An amount of 0 is as large as time or disk allow."""

    out: Path  # the head's folder; the run's own files are in `work`
    model: ModelConfig
    form: str = option("eagle3", "--form FORM", "form of the head: eagle3 (default) or dspark", choices=FORMS)
    minutes: float = option(60.0, "--minutes N", "minutes that the whole run should take; default 60", at_least=1e-3)
    prompts: Path | None = option(
        None, "--prompts FILE", 'JSONL: {"text": …} or {"messages": […]}; default: the model writes them'
    )
    traffic: Path | None = option(
        None, "--from-traffic DIR", "train on the answers that decode_node.keep_answers has stored there"
    )
    init_from: Path | None = option(
        None, "--init-from HEAD", "continue from this eagle3 head, and keep its feature layers"
    )
    draft_vocab_size: int = option(
        4096, "--draft-vocab N", "size of the head's vocabulary, the most frequent tokens; default 4096", at_least=1
    )
    num_steps: int = option(
        4,
        "--steps N",
        "number of draft tokens that are trained, each from the head's own outputs, or as a dspark block; default 4",
        at_least=1,
    )
    num_layers: int = option(1, "--layers N", "decoder layers of a dspark head; default 1", at_least=1)
    rank: int = option(
        64, "--rank N", "rank of the part of a dspark head that knows the token before; default 64", at_least=1
    )
    answer_tokens: int = option(
        0, "--answer-tokens N", "answer tokens to write, in place of a quarter of --minutes", at_least=0
    )
    passes: float = option(
        0.0, "--passes N", "passes over all training texts, in place of a limit of time for them", at_least=0
    )
    batch_tokens: int = option(1024, "--batch-tokens N", "answer tokens in a training step; default 1024", at_least=1)
    feature_gb: float = option(
        0.0, "--feature-gb N", "disk space for hidden states in GB; default: half of what is free", at_least=0
    )
    learning_rate: float = option(1.2e-3, "--rate R", "learning rate; default 0.0012", at_least=1e-9, at_most=1)
    concurrency: int = 64  # requests at once
    max_answer_tokens: int = 256
    max_length: int = 1024  # maximum tokens of a prompt with its answer; longer texts are left out
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        for item in self.options():
            value, limits = getattr(self, item.name), item.metadata["limits"]
            if not limits.allow(value):
                raise ConfigError(f"{item.metadata['flag']} {value!r} is not {limits}")
        if self.prompts is not None and self.traffic is not None:
            raise ConfigError("--prompts and --from-traffic are both sources of answers: give one of them")
        if self.init_from is not None and self.form != "eagle3":
            raise ConfigError("--init-from continues an eagle3 head: leave --form at eagle3")

    @classmethod
    def options(cls) -> list[Field[Any]]:
        """Returns the fields that were made by `option`."""
        return [item for item in fields(cls) if item.metadata]

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
        """The options that a continued run must not change, by name, because its files depend on them."""
        of_model = {"model": self.model.id, **{name: getattr(self.model, name) for name in FIXED_OF_MODEL}}
        own = {item.metadata["flag"][2:]: getattr(self, item.name) for item in self.options() if item.name in FIXED}
        return of_model | {name: str(each.resolve()) if isinstance(each, Path) else each for name, each in own.items()}


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
