"""The adapters (LoRA) of the cluster: which ones nodes have, and those that clients have loaded through this router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from outrider.errors import (
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
from router.nodes.node_adapters import NodeAdapters, Step, agreed

RETRY_SECONDS = 5.0
"""Seconds before the second attempt to load or unload an adapter on a node; doubled for each further one."""
MAX_RETRY_SECONDS = 60.0
REPORT_SECONDS = 2.0
"""Seconds that a call waits for the nodes' reports to show its effect, since requests are placed by reports."""
MAX_CHANGES = 64
"""Maximum calls that load or unload adapters at a time, including those whose clients have left."""
MAX_LOST_NODES = 256
"""Maximum processes that are remembered while they do not serve."""

_log = get_logger("adapters")
T = TypeVar("T")


class ClusterAdapters:
    """Owned by the event loop.

    Adapters that were loaded through this router are wanted: nodes that lack one are made to load it, until it is
    unloaded. What is unloaded is unwanted on each process that has it, or was asked to load it, until the process no
    longer has it; so it does not come back with a node that was lost. If a process loses a wanted adapter that is not
    unwanted there, another router has unloaded it. If it gets one that this router has not asked it to load, another
    router has, and the adapter is unwanted nowhere.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Adapter] = {}  # the adapters that a request may name
        self._wanted: dict[str, tuple[Adapter, str]] = {}  # by name: (adapter, directory)
        self._nodes: dict[bytes, NodeAdapters] = {}  # by incarnation, serving or not
        self._serving: list[NodeAdapters] = []  # prefill and decode nodes
        self._reported: dict[str, Adapter] = {}  # of decode nodes; kept while none serves
        self._others: set[Adapter] = set()  # those of serving nodes that their names do not stand for
        self._changed = asyncio.Event()
        self._changes: dict[asyncio.Task[Any], str] = {}  # clients' calls, with the names of the adapters
        self._changing: dict[str, Adapter | None] = {}  # what names stand for while clients' calls change them
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name

    def is_served(self, adapter: Adapter) -> bool:
        """Whether requests that name the adapter get this one, and not another one of its name."""
        return self.by_name.get(adapter.name) == adapter

    def by_name_for(self, name: str, fingerprint: str) -> Mapping[str, Adapter]:
        """Returns `by_name`, in which the name stands for the adapter of the fingerprint if a decode node has it."""
        adapter = Adapter(name, fingerprint)
        if not fingerprint or self.is_served(adapter) or not any(adapter in node.usable for node in self._decode_nodes):
            return self.by_name
        return {**self.by_name, name: adapter}

    def was_unloaded(self, adapter: Adapter) -> bool:
        """Whether no decode node has the adapter or will have it: none is lost that may come back with it."""
        has = any(adapter in node.usable for node in self._nodes.values() if isinstance(node.link, DecodeLink))
        return not (has or self.is_served(adapter))

    def follow(self, links: Iterable[NodeLink]) -> None:
        """Follows the serving prefill and decode nodes, which have come, gone or reported other adapters."""
        known, links_of = self._nodes, {link.incarnation: link for link in links}
        lost_nodes = {each: node for each, node in known.items() if each not in links_of}
        serving = {each: known.get(each) or NodeAdapters(link) for each, link in links_of.items()}
        for incarnation, node in (lost_nodes | serving).items():
            node.set_link(links_of.get(incarnation))
        self._nodes = dict(list(lost_nodes.items())[-MAX_LOST_NODES:]) | serving  # the latest losses are the last
        self._serving = list(serving.values())
        for incarnation, node in serving.items():
            lost, got = node.take_report(node.link.adapters)
            for adapter in lost:  # another router has unloaded it
                self._forget(adapter, is_asked=True)
            for adapter in got if incarnation in known else ():
                self._permit(adapter)
        self._update_names()
        self._name_missing([node for incarnation, node in serving.items() if incarnation not in known])
        for node in self._serving:
            if self._steps(node) and (node.work is None or node.work.done()):
                node.work = asyncio.create_task(self._work(node), name="adapters")
        self._changed.set()

    async def load(self, name: str, directory: str) -> Adapter:
        """Loads an adapter on all serving nodes, or on none; those that are lost or late get it later.

        Goes on if the caller is cancelled. Returns when requests for the adapter can be placed.

        Raises: OutriderError of a node that refuses; MismatchError if nodes have different adapters in the directory;
        AlreadyRunningError; CapacityError; PeerLostError if no node has loaded it.
        """
        return await self._change(name, partial(self._load, name, directory))

    async def unload(self, name: str) -> None:
        """Unloads an adapter from all nodes. Goes on if the caller is cancelled.

        Raises: NotFoundError; NotAllowedError if it stays on nodes whose settings have it; CapacityError;
        PeerLostError if no decode node serves, unless it was loaded through this router; OutriderError of a node.
        """
        await self._change(name, partial(self._unload, name))

    async def stop(self) -> None:
        self.follow(())
        tasks = [*self._changes, *(node.work for node in self._nodes.values() if node.work is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ state

    @property
    def _decode_nodes(self) -> list[NodeAdapters]:
        return [node for node in self._serving if isinstance(node.link, DecodeLink)]

    @property
    def _known(self) -> set[Adapter]:
        """The adapters that requests may name, and others of serving nodes."""
        return {*self.by_name.values(), *(adapter for node in self._serving for adapter in node.usable)}

    def _permit(self, adapter: Adapter) -> None:
        for node in self._nodes.values():
            node.permit(adapter)

    def _forget(self, adapter: Adapter, *, is_asked: bool = False) -> None:
        if self._wanted.get(adapter.name, (None,))[0] == adapter:
            del self._wanted[adapter.name]
            _log.info("adapter unloaded", adapter=str(adapter), is_asked_by_others=is_asked)
        if self._changing.get(adapter.name) == adapter:
            self._changing[adapter.name] = None
        for node in self._nodes.values():
            node.forget(adapter, is_asked=is_asked)

    def _update_names(self) -> None:
        decode_nodes = [node.usable for node in self._decode_nodes]
        unwanted = {adapter for node in self._nodes.values() for adapter in node.unwanted}
        kept = {name: adapter for name, adapter in self._reported.items() if adapter not in unwanted}
        self._reported = agreed(decode_nodes) if decode_nodes else kept
        wanted = {name: adapter for name, (adapter, _) in self._wanted.items()}
        names: dict[str, Adapter | None] = {**self._reported, **wanted, **self._changing}
        self.by_name = {name: adapter for name, adapter in names.items() if adapter is not None}
        others = {adapter for adapter in self._known if self.by_name.get(adapter.name, adapter) != adapter}
        for adapter in others - self._others:
            used = str(self.by_name[adapter.name])
            _log.warning("nodes have different adapters of one name", used=used, unused=str(adapter))
        self._others = others

    def _name_missing(self, newcomers: Iterable[NodeAdapters]) -> None:
        """Logs what new processes lack and will not get, unless another router has them load it."""
        message = "the node lacks adapters that others have; unless another router loads them, load them again"
        for node in newcomers:
            known = {*self._wanted, *self._changing, *(adapter.name for adapter in node.reported)}
            others = {
                str(adapter) for each in self._decode_nodes for adapter in each.usable if adapter.name not in known
            }
            if others:
                _log.warning(message, node=node.link.name, adapters=sorted(others))

    def _steps(self, node: NodeAdapters) -> list[Step]:
        """Returns what to load or unload on the node now. Clients' calls have their names for themselves."""
        steps = node.steps(self._wanted.values()) if node.is_serving else []
        return [step for step in steps if step[0].name not in self._changes.values()]

    async def _work(self, node: NodeAdapters) -> None:
        """Loads and unloads what the node should, until its reports show no difference."""
        while steps := self._steps(node):
            await self._take_steps(node, steps)

    async def _take_steps(self, node: NodeAdapters, steps: list[Step]) -> None:
        pause = min(RETRY_SECONDS * 2 ** min(node.num_failures(steps), 4), MAX_RETRY_SECONDS)
        for step in steps:
            if step in self._steps(node):
                await node.take_step(step)
        self._update_names()
        await self._wait(lambda: self._steps(node) != steps, pause)

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for a condition on the nodes' state, or for some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    # ------------------------------------------------------------ clients' calls

    async def _change(self, name: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Makes a change when it is the only one of its name, whether or not the caller is cancelled."""
        if len(self._changes) >= MAX_CHANGES:
            raise CapacityError(f"limit of {MAX_CHANGES} loads and unloads of adapters reached")
        task = asyncio.create_task(self._change_alone(name, change), name="adapters")
        self._changes[task] = name
        task.add_done_callback(self._end_change)
        return await asyncio.shield(task)

    def _end_change(self, task: asyncio.Task[Any]) -> None:
        del self._changes[task]
        self.follow([node.link for node in self._serving])

    async def _change_alone(self, name: str, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._locks.setdefault(name, asyncio.Lock()):
            works = [node.work for node in self._nodes.values() if node.work is not None and node.busy_with == name]
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            self.follow([node.link for node in self._serving])  # starts the work on other names again
            self._changing[name] = self.by_name.get(name)
            try:
                return await change()
            finally:
                del self._changing[name]
                self._update_names()

    async def _load(self, name: str, directory: str) -> Adapter:
        nodes = self._serving
        known = self._known
        results = await asyncio.gather(*(node.load(name, directory) for node in nodes), return_exceptions=True)
        loaded = {node: result for node, result in zip(nodes, results, strict=True) if isinstance(result, Adapter)}
        found = set(loaded.values())
        for node in nodes:  # lost ones may have loaded it, too
            node.asked |= found - node.reported
        errors = [result for result in results if isinstance(result, BaseException)]
        refusals = [error for error in errors if not isinstance(error, PeerLostError)]
        if len(found) > 1:
            names = ", ".join(sorted(node.link.name for node in loaded))
            refusals.append(MismatchError(f"directory {directory!r} has different adapters on {names}"))
        if found and name in self._wanted and self._wanted[name][0] not in found:
            refusals.append(AlreadyRunningError(f"another adapter has the name {name!r}", reason="ADAPTER_EXISTS"))
        if refusals:
            _log.warning("adapter not loaded", adapter=name, errors=[str(error) for error in refusals])
            with suppress(OutriderError):
                await self._remove(found - known)
            raise refusals[0]
        if not found:
            raise (errors or [PeerLostError("no node serves, so no adapter can be loaded", reason="NO_NODE")])[0]
        adapter = found.pop()
        self._wanted[name] = adapter, directory
        self._permit(adapter)
        _log.info("adapter loaded", adapter=str(adapter), nodes=[node.link.name for node in loaded])
        await self._wait(lambda: all(adapter in node.reported for node in loaded if node.is_serving), REPORT_SECONDS)
        return adapter

    async def _unload(self, name: str) -> None:
        if not self._decode_nodes and name not in self._wanted:  # another router may want it
            message = f"no decode node serves that could unload {name!r}: unload it again when one does"
            raise PeerLostError(message, reason="NO_NODE")
        adapters = [adapter for adapter in self._known if adapter.name == name]
        if not adapters:
            raise NotFoundError(f"no node has an adapter {name!r}", reason="ADAPTER_NOT_FOUND")
        await self._remove(adapters)

    async def _remove(self, adapters: Iterable[Adapter]) -> None:
        """Unloads adapters of one name from all nodes, later from lost ones.

        Raises: OutriderError of a node that is not lost; NotAllowedError if nodes' settings have it.
        """
        for adapter in adapters:
            self._forget(adapter)
        self._update_names()
        pairs = [(node, adapter) for node in self._serving for adapter in adapters]
        results = await asyncio.gather(*(node.unload(adapter) for node, adapter in pairs), return_exceptions=True)
        outcomes = list(zip(pairs, results, strict=True))
        done = [pair for pair, result in outcomes if result is None]
        await self._wait(
            lambda: not any(adapter in node.reported for node, adapter in done if node.is_serving), REPORT_SECONDS
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, PeerLostError | NotAllowedError):
                raise result
        if fixed := [pair for pair, result in outcomes if isinstance(result, NotAllowedError)]:
            names = ", ".join(node.link.name for node, _ in fixed)
            message = f"{fixed[0][1].name!r} is in model.adapters of {names}, where it stays; other nodes unload it"
            raise NotAllowedError(message, reason="ADAPTERS_ARE_FIXED")
