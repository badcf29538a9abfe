"""Profiles the engine thread's next steps on request: first it times them by part, then it takes a torch trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.engine.kv_cache.planes import PlaneSpec
from outrider.engine.step_clock import ForwardPhases, StepClock
from outrider.profile import FORWARD_PREFIX, FORWARD_REST, Capture, Captured, Part, Profile, ProfiledStep, StepKind

if TYPE_CHECKING:
    from outrider.engine.kv_cache.sequence_kv import SequenceKV
    from outrider.engine.scheduler import Scheduled
    from outrider.engine.torch_trace import TorchTrace


class StepProfiler:
    """A profiler that runs one capture at a time. Engine thread only. Without a capture it costs one comparison per
    step.

    A step is timed or traced, never both, because torch's profiler slows down every operation and so changes timings.
    """

    def __init__(
        self,
        clock: StepClock,
        phases: ForwardPhases | None = None,
        *,
        planes: Sequence[PlaneSpec] = (),
        weights: str = "",
        read_event_loop: Callable[[], int] = lambda: 0,
        start_trace: Callable[[], TorchTrace] | None = None,
    ) -> None:
        """`planes`: the planes of the KV cache. `weights`: the format of the model's weights.

        `read_event_loop`: returns the CPU time that the event loop's thread has used so far, in nanoseconds.
        """
        self.clock = clock
        self._phases = phases or ForwardPhases()
        self._planes = planes
        self._weights = weights
        self._read_event_loop = read_event_loop
        self._start_trace = start_trace or _start_torch_trace
        self._capture: Capture | None = None
        self._steps: list[ProfiledStep] = []
        self._trace: TorchTrace | None = None
        self._num_traced_steps = 0
        self._longest = 0, 0  # tokens of the longest sequence of a step, and bytes of its keys and values
        self._event_loop_nanoseconds = 0

    @property
    def is_capturing(self) -> bool:
        return self._capture is not None

    def begin(self, capture: Capture) -> None:
        """Ends the running capture, if any, and starts this one."""
        self.end()
        self._capture = capture
        self._steps = []
        self._num_traced_steps = 0
        self._longest = 0, 0
        self._phases.start()
        self._event_loop_nanoseconds = self._read_event_loop()
        self.clock.restart()

    def end(self, capture: Capture | None = None) -> None:
        """Ends the current capture and delivers its steps so far. `capture`: the only one to end; None: ends any."""
        current = self._capture
        if current is None or capture not in (None, current):
            return
        self._capture = None
        self._phases.stop()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
        profile = Profile(
            steps=tuple(self._steps),
            num_traced_steps=self._num_traced_steps,
            kv_bytes_per_token=sum(
                plane.bytes_per_token for plane in self._planes if not (plane.is_feature or plane.is_state)
            ),
            feature_bytes_per_token=sum(plane.bytes_per_token for plane in self._planes if plane.is_feature),
            num_longest_tokens=self._longest[0],
            longest_kv_bytes=self._longest[1],
            weights=self._weights,
        )
        current.on_done(Captured(profile, trace.export if trace is not None and self._num_traced_steps else None))
        self.clock.restart()

    def step_ended(
        self, nanoseconds: Mapping[str, int], *, kind: StepKind, num_rows: int, scheduled: Sequence[Scheduled]
    ) -> None:
        """Records a step. `nanoseconds`: the time of each part, from the clock. `scheduled`: its sequences."""
        if self._capture is None:
            return
        self._measure_longest([item.sequence.kv for item in scheduled if item.sequence.kv is not None])
        options = self._capture.options
        if self._trace is not None:
            self._trace.step_ended()
            self._num_traced_steps += 1
        else:
            before, self._event_loop_nanoseconds = self._event_loop_nanoseconds, self._read_event_loop()
            self._steps.append(
                ProfiledStep(
                    kind=kind,
                    num_rows=num_rows,
                    num_sequences=len(scheduled),
                    nanoseconds=self._split_forward(nanoseconds),
                    event_loop_nanoseconds=self._event_loop_nanoseconds - before,
                )
            )
            if len(self._steps) == options.num_steps and options.num_traced_steps:
                self._phases.stop()
                self._trace = self._start_trace()
        if len(self._steps) == options.num_steps and self._num_traced_steps == options.num_traced_steps:
            self.end()

    def _measure_longest(self, tables: Sequence[SequenceKV]) -> None:
        longest = max(tables, key=lambda kv: kv.num_tokens, default=None)
        if longest is None or longest.num_tokens <= self._longest[0]:
            return
        held, planes = longest.num_held_tokens, [plane for plane in self._planes if not plane.is_feature]
        num_bytes = sum(held.get(plane.window, held[0]) * plane.bytes_per_token for plane in planes)
        self._longest = longest.num_tokens, num_bytes

    def _split_forward(self, nanoseconds: Mapping[str, int]) -> Mapping[str, int]:
        """Replaces the forward part by its phases and the remaining time."""
        phases = self._phases.take()
        if not phases:
            return nanoseconds
        split = {part: spent for part, spent in nanoseconds.items() if part != Part.FORWARD}
        split.update({FORWARD_PREFIX + name: spent for name, spent in phases.items()})
        split[FORWARD_REST] = nanoseconds.get(Part.FORWARD, 0) - sum(phases.values())
        return split


def _start_torch_trace() -> TorchTrace:
    from outrider.engine.torch_trace import TorchTrace

    return TorchTrace()
