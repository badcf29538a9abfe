"""The adapters (LoRA) of the cluster: which ones nodes have, and those that clients have loaded through this router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from outrider.errors import (
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    OutriderError,
    PeerLostError,
)
from outrider.request import Adapter
from outrider.service.telemetry.logging import get_logger
from router.nodes.link import DecodeLink, NodeLink
from router.nodes.transport import racing

RETRY_SECONDS = 5.0
"""Seconds between attempts to load or unload an adapter on a node that failed to do so."""
REPORT_SECONDS = 2.0
"""Seconds that a call waits for the nodes' reports to show its effect, since requests are placed by reports."""
MAX_CHANGES = 64
"""Maximum calls that load or unload adapters at a time, including those whose clients have left."""
MAX_LOST_NODES = 256
"""Maximum processes that are remembered while they do not serve."""

_log = get_logger("adapters")
T = TypeVar("T")


class Wanted(NamedTuple):
    """An adapter that was loaded through this router."""

    adapter: Adapter
    directory: str


@dataclass(slots=True, eq=False)
class NodeAdapters:
    """What is known about the adapters of one process of a node, and what it is still to do."""

    is_decode: bool
    reported: frozenset[Adapter] = frozenset()
    unwanted: dict[Adapter, bool] = field(default_factory=dict)  # to be unloaded; True after the node's answer
    asked: set[Adapter] = field(default_factory=set)  # loads that no report shows yet, with or without an answer
    failures: dict[Adapter, OutriderError] = field(default_factory=dict)  # of the last attempts
    work: asyncio.Task[None] | None = None
    busy_with: str = ""  # name of the adapter that `work` is loading or unloading

    @property
    def usable(self) -> frozenset[Adapter]:
        return self.reported - self.unwanted.keys()


def steps_of(node: NodeAdapters, wanted: Iterable[Adapter]) -> list[Adapter]:
    """Returns the adapters that the node should unload, all of them in `node.unwanted`, then those that it should load.

    An adapter is not loaded where the node may keep another one of its name, or had other content in the directory.
    """
    unload = [adapter for adapter, is_done in node.unwanted.items() if adapter in node.reported or not is_done]
    taken = {adapter.name for adapter in node.usable}
    mismatched = {adapter for adapter, error in node.failures.items() if isinstance(error, MismatchError)}
    return unload + [adapter for adapter in wanted if adapter.name not in taken and adapter not in mismatched]


def agreed(reports: Iterable[Iterable[Adapter]]) -> dict[str, Adapter]:
    """Returns the adapters by name. A name stands for what most reports have; of several, the smallest fingerprint."""
    counts = Counter(adapter for report in reports for adapter in report)
    ranked = sorted(counts, key=lambda adapter: (-counts[adapter], adapter.fingerprint))
    return {adapter.name: adapter for adapter in reversed(ranked)}


class ClusterAdapters:
    """Owned by the event loop.

    Adapters that were loaded through this router are wanted: nodes that lack one are made to load it, until it is
    unloaded. What is unloaded is unwanted on each process that has it, or may have it because it was asked to load
    it. That lasts until the process no longer has it, so that it does not come back with a node that was lost. If a
    process loses a wanted adapter that is not unwanted there, another router has unloaded it. If a process gets an
    unwanted one that this router did not load, another router has loaded it anew.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Adapter] = {}  # the adapters that a request may name
        self._wanted: dict[str, Wanted] = {}  # by name
        self._nodes: dict[bytes, NodeAdapters] = {}  # by incarnation, serving or not
        self._serving: dict[NodeLink, NodeAdapters] = {}  # prefill and decode nodes
        self._reported: dict[str, Adapter] = {}  # of decode nodes; kept while none serves
        self._disputed: dict[str, set[Adapter]] = {}  # by name: the different adapters that nodes had
        self._changed = asyncio.Event()
        self._changes: set[asyncio.Task[Any]] = set()  # clients' calls
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name
        self._changing: set[str] = set()  # names that a client's call changes

    def is_served(self, adapter: Adapter) -> bool:
        """Whether requests that name the adapter get this one, and not another one of its name."""
        return self.by_name.get(adapter.name) == adapter

    def follow(self, links: Iterable[NodeLink]) -> None:
        """Follows the serving prefill and decode nodes, which have come, gone or reported other adapters."""
        known = set(self._nodes)
        self._serving = {
            link: self._nodes.setdefault(link.incarnation, NodeAdapters(isinstance(link, DecodeLink))) for link in links
        }
        serving = {link.incarnation for link in self._serving}
        for incarnation in [each for each in self._nodes if each not in serving][:-MAX_LOST_NODES]:
            del self._nodes[incarnation]
        for link, node in self._serving.items():
            self._take_report(node, frozenset(link.adapters), is_known=link.incarnation in known)
        self._update()
        for link, node in self._serving.items():
            if self._steps(link, node) and (node.work is None or node.work.done()):
                node.work = asyncio.create_task(self._work(link, node), name="adapters")
        self._changed.set()

    async def load(self, name: str, directory: str) -> Adapter:
        """Loads an adapter on all serving nodes, or on none; lost and late nodes get it later.

        Returns when requests for it can be placed. Goes on if the caller is cancelled.

        Raises: OutriderError of a node that refuses; MismatchError if nodes have different adapters in the directory;
        AlreadyRunningError; CapacityError; PeerLostError if no node loads it.
        """
        return await self._change(name, partial(self._load, name, directory))

    async def unload(self, name: str) -> None:
        """Unloads an adapter from all nodes. Goes on if the caller is cancelled.

        Raises: NotFoundError; NotAllowedError if a node's settings have it; CapacityError; OutriderError of a node.
        """
        await self._change(name, partial(self._unload, name))

    async def stop(self) -> None:
        tasks = [*self._changes, *(node.work for node in self._nodes.values() if node.work is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_report(self, node: NodeAdapters, reported: frozenset[Adapter], *, is_known: bool) -> None:
        for adapter in node.reported - reported:
            held = self._wanted.get(adapter.name)
            if held is not None and held.adapter == adapter and adapter not in node.unwanted:
                _log.info("another router has unloaded an adapter", adapter=str(adapter))
                self._forget(adapter, is_everywhere=False)
        for adapter in reported - node.reported - node.unwanted.keys() - node.asked:
            if is_known:  # another router has loaded it anew
                for other in self._nodes.values():
                    other.unwanted.pop(adapter, None)
        node.reported = reported
        node.asked -= reported
        node.unwanted = {each: is_done for each, is_done in node.unwanted.items() if each in reported or not is_done}

    def _update(self) -> None:
        """Updates what names stand for."""
        nodes = self._serving.values()
        if any(node.is_decode for node in nodes):
            self._reported = agreed(node.usable for node in nodes if node.is_decode)
        else:
            unwanted = {adapter for node in self._nodes.values() for adapter in node.unwanted}
            self._reported = {name: each for name, each in self._reported.items() if each not in unwanted}
        self.by_name = self._reported | {name: wanted.adapter for name, wanted in self._wanted.items()}
        found: dict[str, set[Adapter]] = {}
        for adapter in {*self.by_name.values(), *(adapter for node in nodes for adapter in node.usable)}:
            found.setdefault(adapter.name, set()).add(adapter)
        disputed = {name: adapters for name, adapters in found.items() if len(adapters) > 1}
        for name in [name for name, adapters in disputed.items() if self._disputed.get(name) != adapters]:
            chosen, others = str(self.by_name.get(name)), sorted(map(str, disputed[name]))
            _log.warning("nodes have different adapters of one name", adapter=chosen, found=others)
        self._disputed = disputed

    def _want(self, wanted: Wanted) -> None:
        self._wanted[wanted.adapter.name] = wanted
        for node in self._nodes.values():
            node.failures.pop(wanted.adapter, None)
            if node.unwanted.pop(wanted.adapter, False):
                node.reported -= {wanted.adapter}  # otherwise the report that lacks it would say that it was unloaded

    def _forget(self, adapter: Adapter, *, is_everywhere: bool) -> None:
        """Has nodes unload an adapter. If not `is_everywhere`, another router does so on the serving nodes."""
        held = self._wanted.get(adapter.name)
        if held is not None and held.adapter == adapter:
            del self._wanted[adapter.name]
        serving = set(self._serving.values())
        for node in self._nodes.values():
            node.failures.pop(adapter, None)
            if adapter in node.asked or (is_everywhere if node in serving else adapter in node.reported):
                node.unwanted[adapter] = False

    # ------------------------------------------------------------ clients' calls

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Makes a change when it is the only one of its name, whether or not the caller is cancelled."""
        if len(self._changes) >= MAX_CHANGES:
            raise CapacityError(
                f"limit of {MAX_CHANGES} loads and unloads of adapters reached", reason="TOO_MANY_CALLS"
            )
        task = asyncio.create_task(self._change_alone(name, change), name="adapters")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _change_alone(self, name: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            self._changing.add(name)
            try:
                works = [node.work for node in self._nodes.values() if node.work is not None and node.busy_with == name]
                for work in works:
                    work.cancel()
                await asyncio.gather(*works, return_exceptions=True)
                self.follow(self._serving)  # other names' work goes on
                return await change()
            finally:
                self._changing.discard(name)
                self.follow(self._serving)

    async def _load(self, name: str, directory: str) -> Adapter:
        known = {adapter for node in self._nodes.values() for adapter in node.usable} | set(self.by_name.values())
        asked = dict(self._serving)
        results = await asyncio.gather(
            *(self._load_on(link, node, name, directory) for link, node in asked.items()), return_exceptions=True
        )
        loaded = {link: result for link, result in zip(asked, results, strict=True) if isinstance(result, Adapter)}
        found = set(loaded.values())
        for node in asked.values():
            node.asked |= found - node.reported
        lost = [result for result in results if isinstance(result, PeerLostError)]
        refusals = [each for each in results if isinstance(each, BaseException) and not isinstance(each, PeerLostError)]
        if len(found) > 1:
            refusals.append(MismatchError(f"directory {directory!r} has different adapters on {_names(loaded)}"))
        if name in self._wanted and not found <= {self._wanted[name].adapter}:
            refusals.append(AlreadyRunningError(f"another adapter has the name {name!r}", reason="ADAPTER_EXISTS"))
        if refusals:
            with suppress(OutriderError):
                await self._remove(found - known)
            raise refusals[0]
        if not found:
            raise (lost or [PeerLostError("no node serves, so no adapter can be loaded", reason="NO_NODE")])[0]
        adapter = found.pop()
        self._want(Wanted(adapter, directory))
        _log.info("adapter loaded", adapter=str(adapter), nodes=_names(loaded))
        await self._until_reported(lambda: all(adapter in link.adapters for link in loaded if link in self._serving))
        return adapter

    async def _unload(self, name: str) -> None:
        wanted = self._wanted.get(name)
        having = {adapter for node in self._serving.values() for adapter in node.usable} | set(self.by_name.values())
        adapters = {adapter for adapter in having if adapter.name == name}
        if not adapters:
            raise NotFoundError(f"no node has an adapter {name!r}", reason="ADAPTER_NOT_FOUND")
        try:
            await self._remove(adapters)
        except NotAllowedError:
            if wanted is not None:
                self._want(wanted)
            raise
        _log.info("adapter unloaded", adapter=name)

    async def _remove(self, adapters: Iterable[Adapter]) -> None:
        """Unloads adapters from all nodes; from lost ones later. Raises: OutriderError, except for lost nodes."""
        for adapter in adapters:
            self._forget(adapter, is_everywhere=True)
        self._update()
        pairs = [(link, node, adapter) for link, node in self._serving.items() for adapter in adapters]
        results = await asyncio.gather(*(self._unload_on(*pair) for pair in pairs), return_exceptions=True)
        done = [(link, adapter) for (link, _, adapter), result in zip(pairs, results, strict=True) if result is None]
        await self._until_reported(
            lambda: not any(adapter in link.adapters for link, adapter in done if link in self._serving)
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, PeerLostError):
                raise result

    async def _until_reported(self, condition: Callable[[], bool]) -> None:
        with suppress(TimeoutError):  # a frozen node must not hold up the client
            async with asyncio.timeout(REPORT_SECONDS):
                await self._until(condition)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------ nodes

    def _steps(self, link: NodeLink, node: NodeAdapters) -> list[Adapter]:
        if self._serving.get(link) is not node:
            return []
        steps = steps_of(node, [wanted.adapter for wanted in self._wanted.values()])
        return [adapter for adapter in steps if adapter.name not in self._changing]

    async def _work(self, link: NodeLink, node: NodeAdapters) -> None:
        """Loads and unloads what the node should, until its reports show no difference."""
        while steps := self._steps(link, node):
            for adapter in steps:
                if adapter in self._steps(link, node):
                    await self._take_step(link, node, adapter)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await self._until(lambda steps=steps: self._steps(link, node) != steps)

    async def _take_step(self, link: NodeLink, node: NodeAdapters, adapter: Adapter) -> None:
        node.busy_with = adapter.name
        try:
            if adapter in node.unwanted:
                await self._unload_on(link, node, adapter)
            else:
                node.asked.add(adapter)
                await self._load_on(link, node, adapter.name, self._wanted[adapter.name].directory, adapter.fingerprint)
            node.failures.pop(adapter, None)
        except OutriderError as error:
            if not isinstance(error, PeerLostError):
                node.asked.discard(adapter)
            known = node.failures.get(adapter)
            if known is None or known.message != error.message:
                _log.warning("adapter not changed", adapter=str(adapter), node=link.name, error=error.message)
            node.failures[adapter] = error
        finally:
            node.busy_with = ""

    async def _load_on(
        self, link: NodeLink, node: NodeAdapters, name: str, directory: str, fingerprint: str = ""
    ) -> Adapter:
        for old in [each for each, is_done in node.unwanted.items() if each.name == name and not is_done]:
            await self._unload_on(link, node, old)
        return await self._ask(link, node, link.transport.load_adapter(name, directory, fingerprint))

    async def _unload_on(self, link: NodeLink, node: NodeAdapters, adapter: Adapter) -> None:
        try:
            with suppress(NotFoundError):
                await self._ask(link, node, link.transport.unload_adapter(adapter.name, adapter.fingerprint))
        except NotAllowedError:  # its settings have it
            del node.unwanted[adapter]
            raise
        node.asked.discard(adapter)
        if adapter in node.reported:
            node.unwanted[adapter] = True
        else:
            node.unwanted.pop(adapter, None)

    async def _ask(self, link: NodeLink, node: NodeAdapters, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call to a node. Raises: OutriderError that names the node; PeerLostError if it is lost or late."""
        try:
            async with racing(call, self._until(lambda: self._serving.get(link) is not node)) as (answer, _):
                if not answer.done():
                    raise PeerLostError("the node is lost", node=link.name)
                return answer.result()
        except AbortedError as error:
            raise PeerLostError(f"{link.name}: {error.message}", node=link.name) from error
        except OutriderError as error:
            error.message = f"{link.name}: {error.message}"
            raise


def _names(links: Iterable[NodeLink]) -> str:
    return ", ".join(sorted(link.name for link in links))
