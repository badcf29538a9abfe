"""The adapters (LoRA) of the cluster: which ones nodes have, and those that clients have loaded through this router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from outrider.errors import MismatchError, NotFoundError, OutriderError, PeerLostError
from outrider.request import Adapter
from outrider.service.telemetry.logging import get_logger
from router.nodes.link import DecodeLink, NodeLink

RETRY_SECONDS = 5.0
"""Seconds between attempts to load an adapter on a node that failed to load it."""
REPORT_SECONDS = 2.0
"""Seconds that a load waits for the nodes' reports to show the adapter, before which no request could be placed."""

_log = get_logger("adapters")


class ClusterAdapters:
    """Owned by the event loop.

    What nodes report is the truth: they may have loaded an adapter by their settings or for another router. Adapters
    that were loaded through this router are loaded again on nodes that start later, until they are unloaded, here or
    through another router.
    """

    def __init__(self) -> None:
        self._links: Sequence[NodeLink] = ()  # serving prefill and decode nodes
        self._reported: Mapping[str, Adapter] = {}  # of decode nodes; kept while none serves
        self._wanted: dict[str, tuple[str, Adapter]] = {}  # by name: (directory, adapter), loaded through this router
        self._last: dict[bytes, tuple[Adapter, ...]] = {}  # by incarnation of a serving node
        self._loading: dict[bytes, asyncio.Task[None]] = {}  # by incarnation: loads what the node lacks
        self._changed = asyncio.Event()

    @property
    def by_name(self) -> dict[str, Adapter]:
        """The adapters that a request may name."""
        return {**{name: adapter for name, (_, adapter) in self._wanted.items()}, **self._reported}

    def follow(self, links: Iterable[NodeLink]) -> None:
        """Follows the serving prefill and decode nodes, which have come, gone or reported other adapters."""
        self._links = tuple(links)
        decode_nodes = [link for link in self._links if isinstance(link, DecodeLink)]
        if decode_nodes:
            self._reported = {each.name: each for link in reversed(decode_nodes) for each in link.adapters}
        for link in self._links:
            for adapter in set(self._last.get(link.incarnation, ())).difference(link.adapters):
                self._wanted.pop(adapter.name, None)  # somebody has unloaded it
        self._last = {link.incarnation: link.adapters for link in self._links}
        for link in self._links:
            if self._missing(link) and link.incarnation not in self._loading:
                task = asyncio.create_task(self._load_missing(link), name="adapters")
                self._loading[link.incarnation] = task
        self._changed.set()

    async def load(self, name: str, directory: str) -> Adapter:
        """Loads an adapter on all serving nodes, or on none. Returns when requests for it can be placed.

        Raises: OutriderError of a node that refuses; MismatchError if nodes have different adapters in the directory;
        PeerLostError if no node serves.
        """
        links = self._links
        results = await asyncio.gather(*(_load(link, name, directory) for link in links), return_exceptions=True)
        loaded = {link: result for link, result in zip(links, results, strict=True) if isinstance(result, Adapter)}
        errors = [result for result in results if isinstance(result, BaseException)]
        refusals = [error for error in errors if not isinstance(error, PeerLostError)]
        if refusals or len(set(loaded.values())) != 1:
            new = [link for link, adapter in loaded.items() if adapter not in link.adapters]
            await asyncio.gather(*(link.transport.unload_adapter(name) for link in new), return_exceptions=True)
            if refusals or errors:
                raise (refusals or errors)[0]
            if loaded:
                raise MismatchError(f"directory {directory!r} has different adapters on {_names(loaded)}")
            raise PeerLostError("no node serves, so no adapter can be loaded", reason="NO_NODE")
        adapter = next(iter(loaded.values()))
        self._wanted[name] = directory, adapter
        _log.info("adapter loaded", adapter=str(adapter), nodes=[link.name for link in loaded])
        await self._until_reported(loaded, adapter)
        self.follow(self._links)  # nodes may have come meanwhile
        return adapter

    async def unload(self, name: str) -> None:
        """Unloads an adapter from all nodes. Raises: NotFoundError if none has it; OutriderError of a node."""
        was_wanted = self._wanted.pop(name, None) is not None
        links = [link for link in self._links if any(adapter.name == name for adapter in link.adapters)]
        results = await asyncio.gather(*(link.transport.unload_adapter(name) for link in links), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (NotFoundError, PeerLostError)):
                raise result
        if not was_wanted and None not in results:
            raise NotFoundError(f"no node has an adapter {name!r}", reason="ADAPTER_NOT_FOUND")
        _log.info("adapter unloaded", adapter=name, nodes=[link.name for link in links])

    async def stop(self) -> None:
        tasks = tuple(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _missing(self, link: NodeLink) -> list[tuple[str, str]]:
        """Returns (name, directory) of the adapters that the node should have, and has not."""
        return [(name, where) for name, (where, adapter) in self._wanted.items() if adapter not in link.adapters]

    async def _load_missing(self, link: NodeLink) -> None:
        incarnation = link.incarnation
        try:
            while link.is_serving and link.incarnation == incarnation and (missing := self._missing(link)):
                for name, directory in missing:
                    try:
                        await _load(link, name, directory)
                    except OutriderError as error:
                        _log.warning("adapter not loaded", adapter=name, node=link.name, error=error.message)
                await asyncio.sleep(RETRY_SECONDS)  # reports show meanwhile what the node has
        finally:
            self._loading.pop(incarnation, None)

    async def _until_reported(self, links: Iterable[NodeLink], adapter: Adapter) -> None:
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                while any(link.is_serving and adapter not in link.adapters for link in links):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:  # a frozen node must not hold up the client
            return


async def _load(link: NodeLink, name: str, directory: str) -> Adapter:
    """Loads the adapter on one node. Raises: OutriderError whose message names the node."""
    try:
        return await link.transport.load_adapter(name, directory)
    except OutriderError as error:
        error.message = f"{link.name}: {error.message}"
        raise


def _names(links: Iterable[NodeLink]) -> str:
    return ", ".join(sorted(link.name for link in links))
