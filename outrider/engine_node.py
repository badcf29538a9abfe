"""The part that nodes with an engine share: a thread that computes beside the event loop, and the node's reports."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from outrider import __version__
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_turns import TURN_TAKEN_OVER, CpuTurns, open_turns
from outrider.engine.engine import PromptEngine
from outrider.engine.engine_thread import EngineThread
from outrider.engine.processor import usable_cpus
from outrider.engine.step_progress import StepProgress
from outrider.lossy_stream import exit_now
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeReport, NodeRole, NodeState
from outrider.service.node_service import AdapterDesk, NodeServicer, default_node_name
from outrider.service.profiling import ProfileDesk
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.tracing import NO_TRACER, Tracer

EXIT_ENGINE_FAILED = 70  # EX_SOFTWARE

Built = TypeVar("Built")

_log = get_logger("engine")


def end_process(error: Exception) -> None:
    """Ends the process after a bug or a lost rank, since nothing may be served from the process's state any more.

    The process's supervisor starts another one.
    """
    _log.error("the engine failed; the process ends", error=str(error), exc_info=error)
    exit_now(EXIT_ENGINE_FAILED)


def event_loop_clock() -> Callable[[], int]:
    """Returns a clock of the CPU time, in nanoseconds, of the main thread, where `ServiceProcess` runs the event loop.

    Any thread may read the clock. It is always 0 on systems where a thread cannot read another thread's time.
    """
    main_thread = threading.main_thread().ident
    if main_thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0
    clock = time.pthread_getcpuclockid(main_thread)
    return lambda: time.clock_gettime_ns(clock)


def open_logged_turns(path: str, kernels: CpuKernels | None) -> CpuTurns:
    """Calls `open_turns` for this process's processors, and logs each turn that is taken from another node."""
    log = get_logger("cpu_turns")
    return open_turns(path, kernels, cpus=usable_cpus(), on_turn_taken_over=lambda: log.warning(TURN_TAKEN_OVER))


class EngineNode(Generic[Built]):
    """A `Service` with a name, a state, and a thread that builds an engine and runs it."""

    def __init__(
        self,
        role: NodeRole,
        *,
        build: Callable[[], Built],
        run: Callable[[Built], None],
        on_failure: Callable[[Exception], None] = end_process,
        configured_name: str = "",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`build`, `run`, `on_failure`: see `EngineThread`. `configured_name`: the node's name; if empty, the name
        is made of role and address.
        """
        self._role = role
        self._configured_name = configured_name
        self._tracer = tracer
        self._incarnation = os.urandom(16)
        self._name = configured_name or role.name.lower()
        self._state = NodeState.STARTING
        self._thread = EngineThread(f"{role.name.lower()}-loop", build=build, run=run, on_failure=on_failure)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._parts: Built | None = None

    async def _build(self, address: str) -> Built:
        """Builds the parts in the engine's thread, which runs them after the start."""
        self._name = default_node_name(self._role.name.lower(), address, configured=self._configured_name)
        self._tracer.start(self._name)
        self._event_loop = asyncio.get_running_loop()
        self._parts = await self._thread.build()
        return self._parts

    def _model(self) -> ModelInfo | None:
        """Returns the model, or None until it is loaded."""
        raise NotImplementedError

    def info(self) -> NodeInfo:
        return NodeInfo(
            incarnation=self._incarnation,
            name=self._name,
            role=self._role,
            state=self._state,
            version=__version__,
            model=self._model(),
        )


class EngineLoop(Protocol):
    """The loop that the engine thread of a node with a target model runs."""

    progress: StepProgress

    def submit(self, command: Any) -> None:
        """Queues a command, from any thread."""

    def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """The parts of a node before the loop runs, as the composition root builds them."""

    engine: PromptEngine
    loop: EngineLoop
    model: ModelInfo
    tokenizer_files: Mapping[str, bytes]
    adapters: AdapterDesk
    description: Mapping[str, object]  # fields of the log line at start
    ranks: AbstractContextManager[object] = field(default_factory=nullcontext)  # kept open while the loop runs


Parts = TypeVar("Parts", bound=TargetParts)


class TargetNode(EngineNode[Parts]):
    """A node that computes the target model: it has a tokenizer, and its steps can be profiled."""

    def __init__(
        self,
        role: NodeRole,
        *,
        build: Callable[[], Parts],
        on_failure: Callable[[Exception], None] = end_process,
        configured_name: str,
        tracer: Tracer,
    ) -> None:
        super().__init__(
            role, build=build, run=_run, on_failure=on_failure, configured_name=configured_name, tracer=tracer
        )
        self._node_servicer = NodeServicer(
            self.info,
            self.report,
            lambda: self._parts.tokenizer_files if self._parts else None,
            ProfileDesk(
                can_be_traced=lambda: self._parts is not None and self._parts.engine.runner.can_be_traced,
                node_name=lambda: self._name,
                submit=self._submit,
            ),
            lambda: self._parts.adapters if self._parts else None,
        )

    def describe(self) -> dict[str, Any]:
        return dict(self._parts.description) if self._parts else {}

    def _submit(self, command: Any) -> None:
        """Submits a command to the engine's thread, if there is one already."""
        if self._parts is not None:
            self._parts.loop.submit(command)

    def _model(self) -> ModelInfo | None:
        return self._parts.model if self._parts else None

    def _load(self) -> NodeLoad:
        """Returns the load. Called only when everything is built."""
        raise NotImplementedError

    def report(self) -> NodeReport:
        if self._parts is None:
            return NodeReport(state=self._state, incarnation=self._incarnation)
        progress = self._parts.loop.progress
        current_step = progress.current_step
        return NodeReport(
            state=self._state,
            incarnation=self._incarnation,
            mark=current_step.mark,
            num_steps=progress.num_steps,
            expected_step_seconds=current_step.expected_seconds,
            step_age_seconds=progress.age_seconds(current_step),
            load=self._load(),
            adapters=self._parts.adapters.adapters,
        )


def _run(parts: TargetParts) -> None:
    with parts.ranks:
        parts.loop.run()
