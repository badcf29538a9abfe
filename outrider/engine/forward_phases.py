"""What a forward pass does with its time, told by whoever runs it. Measured only while a profile asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

ATTENTION = "attention"
LINEAR = "linear"
NORM = "norm"


class ForwardPhases(Protocol):
    """Splits forward passes into named phases. Engine thread only.

    Native kernels that run many layers in one call count in there and tell it here; phases
    may have any name. What no phase claims is counted as the forward's rest.
    """

    def start(self) -> None:
        """Forwards are measured from here on."""

    def exclude(self, nanoseconds: int) -> None:
        """So much of the forward under way was a callback's: of no phase."""

    def take(self) -> Mapping[str, int]:
        """Nanoseconds by phase of the forwards since the last `take`. Empty when nothing can be told."""

    def stop(self) -> None:
        """As before `start`. Idempotent."""


class NoPhases:
    """A forward that cannot be split: scripted models, and devices that compute behind the caller's back."""

    def start(self) -> None:
        return

    def exclude(self, nanoseconds: int) -> None:
        return

    def take(self) -> Mapping[str, int]:
        return {}

    def stop(self) -> None:
        return


class ModulePhases:
    """Phases of a model made of torch modules, by hooks that are there only between `start` and `stop`.

    A module's own time counts, without that of measured modules inside it: an attention
    module's projections are LINEAR, the rest of it (rope, cache writes, attending)
    ATTENTION. What belongs to a phase is told from class names, as transformers' are.
    """

    def __init__(self, model: nn.Module, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._model = model
        self._now = now
        self._handles: list[Any] = []
        self._spent: dict[str, int] = {}
        self._inner: list[int] = []  # of each measured module under way: nanoseconds of those inside it
        self._started: list[int] = []

    def start(self) -> None:
        assert not self._handles, "stop comes first"
        for module in self._model.modules():
            phase = phase_of(module)
            if phase is not None:
                self._handles += [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave(phase)),
                ]

    def exclude(self, nanoseconds: int) -> None:
        if self._inner:
            self._inner[-1] += nanoseconds

    def take(self) -> Mapping[str, int]:
        spent, self._spent = self._spent, {}
        return spent

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._spent.clear()

    def _enter(self, _module: nn.Module, _inputs: object) -> None:
        self._inner.append(0)
        self._started.append(self._now())

    def _leave(self, phase: str) -> Callable[[nn.Module, object, object], None]:
        def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
            passed = self._now() - self._started.pop()
            self._spent[phase] = self._spent.get(phase, 0) + passed - self._inner.pop()
            if self._inner:
                self._inner[-1] += passed

        return leave


def phase_of(module: nn.Module) -> str | None:
    """LINEAR for linear layers and shared projections, NORM, ATTENTION; None: not measured by itself."""
    name = type(module).__name__
    if isinstance(module, nn.Linear) or name.endswith(("Linear", "Projection")):
        return LINEAR
    if name.endswith("Norm"):
        return NORM
    return ATTENTION if name.endswith("Attention") else None
