"""The adapters (LoRA) of one node, as far as this router knows them, and the calls that change them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from outrider.errors import (
    AbortedError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    NotSupportedError,
    OutriderError,
    PeerLostError,
)
from outrider.request import Adapter
from outrider.service.telemetry.logging import get_logger
from router.nodes.link import NodeLink
from router.nodes.transport import racing

_log = get_logger("adapters")
T = TypeVar("T")

FINAL_FAILURES = (MismatchError, NotSupportedError)
"""Failures of loads that are not tried again until the process or the wish changes."""

Step = tuple[Adapter, str | None]
"""An adapter, and the directory from which to load it; None: it is to be unloaded."""


def agreed(reports: Iterable[Iterable[Adapter]]) -> dict[str, Adapter]:
    """Returns the adapters by name. A name stands for what most reports have; of several, the smallest fingerprint."""
    counts = Counter(adapter for report in reports for adapter in report)
    ranked = sorted(counts, key=lambda adapter: (-counts[adapter], adapter.fingerprint))
    return {adapter.name: adapter for adapter in reversed(ranked)}


class NodeAdapters:
    """The adapters of one process of a node, which is remembered while it is lost. Owned by the event loop.

    `unwanted` maps adapters that the process must unload to whether it has confirmed that. An entry stays while reports
    show the adapter, or may still come to show it. `asked` holds adapters that the process was asked to load and that
    no report shows yet.
    """

    def __init__(self, link: NodeLink) -> None:
        self.link = link
        self.reported: frozenset[Adapter] = frozenset()
        self.unwanted: dict[Adapter, bool] = {}
        self.asked: set[Adapter] = set()
        self.failures: dict[Adapter, tuple[OutriderError, int]] = {}  # the last one, and how many in a row
        self.work: asyncio.Task[None] | None = None
        self.busy_with = ""  # the name of the adapter that `work` changes
        self._is_lost = asyncio.Event()

    @property
    def usable(self) -> frozenset[Adapter]:
        """The adapters that it has and may keep."""
        return self.reported - self.unwanted.keys()

    @property
    def is_serving(self) -> bool:
        return not self._is_lost.is_set()

    def set_link(self, link: NodeLink | None) -> None:
        """Sets the link by which the process serves; None: it is lost, which ends its calls."""
        if link is None:
            self._is_lost.set()
        else:
            self.link = link
            self._is_lost.clear()

    def take_report(self, reported: Collection[Adapter]) -> tuple[frozenset[Adapter], frozenset[Adapter]]:
        """Returns the adapters that others have made it (lose, get) since the last report."""
        now = frozenset(reported)
        lost, got = self.usable - now, now - self.reported - self.unwanted.keys() - self.asked
        self.reported = now
        self.asked -= now
        may_come = {adapter for adapter in self.asked if not self.unwanted.get(adapter)}
        self.unwanted = {each: is_done for each, is_done in self.unwanted.items() if each in now | may_come}
        return lost, got

    def permit(self, adapter: Adapter) -> None:
        """Lets the process keep an adapter, and permits further attempts to load it."""
        self.failures.pop(adapter, None)
        if self.unwanted.pop(adapter, False):
            self.reported -= {adapter}  # it has unloaded it, so its next report, which lacks it, tells nothing new

    def forget(self, adapter: Adapter, *, is_asked: bool) -> None:
        """Has an adapter unloaded if the process has it or may get it.

        `is_asked`: whether another router unloads it from serving nodes. Then only loads of this one must be undone.
        """
        self.failures.pop(adapter, None)
        if adapter in self.asked or (not is_asked if self.is_serving else adapter in self.reported):
            self.unwanted[adapter] = False

    def steps(self, wanted: Iterable[tuple[Adapter, str]]) -> list[Step]:
        """Returns what to unload, then what to load. `wanted`: adapters and their directories.

        Nothing is loaded where another adapter of the name may stay, where its directory has other content, or by nodes
        that support no adapters.
        """
        unload = [adapter for adapter, is_done in self.unwanted.items() if adapter in self.reported or not is_done]
        taken = {adapter.name for adapter in self.usable}
        never = {each for each, (error, _) in self.failures.items() if isinstance(error, FINAL_FAILURES)}
        load = [each for each in wanted if each[0].name not in taken and each[0] not in never]
        return [*((adapter, None) for adapter in unload), *load]

    def num_failures(self, steps: Iterable[Step]) -> int:
        """Returns the smallest number of failures in a row of one of the steps."""
        return min(self.failures[adapter][1] if adapter in self.failures else 0 for adapter, _ in steps)

    async def take_step(self, step: Step) -> None:
        """Takes one of `steps`. A failure is logged unless it is the last one again."""
        adapter, directory = step
        self.busy_with = adapter.name
        try:
            if directory is None:
                await self.unload(adapter)
            else:
                self.asked.add(adapter)
                await self.load(adapter.name, directory, adapter.fingerprint)
            self.failures.pop(adapter, None)
        except OutriderError as error:
            if not isinstance(error, PeerLostError):
                self.asked.discard(adapter)
            last, number = self.failures.get(adapter, (None, 0))
            if last is None or last.message != error.message:
                _log.warning("adapter not changed", adapter=str(adapter), error=error.message)
            self.failures[adapter] = error, number + 1
        finally:
            self.busy_with = ""

    async def load(self, name: str, directory: str, fingerprint: str = "") -> Adapter:
        """Loads an adapter. Raises: as `_call`."""
        for old in [each for each, is_done in self.unwanted.items() if each.name == name and not is_done]:
            await self.unload(old)
        return await self._call(self.link.transport.load_adapter(name, directory, fingerprint))

    async def unload(self, adapter: Adapter) -> None:
        """Unloads an adapter that the process may have. Raises: as `_call`; NotAllowedError if its settings have it."""
        try:
            with suppress(NotFoundError, NotSupportedError):
                await self._call(self.link.transport.unload_adapter(adapter.name, adapter.fingerprint))
        except NotAllowedError:
            self.unwanted.pop(adapter, None)
            raise
        self.asked.discard(adapter)
        self.unwanted[adapter] = True
        if adapter not in self.reported:
            del self.unwanted[adapter]

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call. Raises: OutriderError that names the node; PeerLostError if it is lost or late."""
        name = self.link.name
        try:
            async with racing(call, self._is_lost.wait()) as (answer, _):
                if not answer.done():
                    raise PeerLostError("the node is lost", node=name)
                result: T = answer.result()
                return result
        except AbortedError as error:  # the deadline has passed, or the node has stopped
            raise PeerLostError(f"{name}: {error.message}", node=name) from error
        except OutriderError as error:
            is_old = isinstance(error, NotSupportedError) and not error.field  # gRPC's answer for a method it lacks
            about = "this version of the node has no adapters: " if is_old else ""
            error.message = f"{name}: {about}{error.message}"
            error.args = (error.message,)
            raise
