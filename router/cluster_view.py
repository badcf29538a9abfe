"""The nodes as this router sees them, and the model that they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.errors import MismatchError, PeerLostError
from outrider.node import ModelInfo, NodeInfo, NodeReport, NodeRole, NodeState
from outrider.service.channels import open_channel
from outrider.service.telemetry.logging import get_logger
from router.config import RouterConfig
from router.node_link import DecodeLink, NodeLink, PrefillLink
from router.resolver import Resolver, resolve_with_dns
from router.sessions import RouterIdentity
from router.tokenizer import Tokenizer

WAITING_LOG_SECONDS = 5.0
CANCEL_AGAIN_SECONDS = 0.2

_log = get_logger("cluster")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the first target node that served brought."""

    info: ModelInfo
    tokenizer: Tokenizer
    node: str  # its name


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One line of WatchCluster. `report` is None for a node that does not serve."""

    name: str
    role: NodeRole
    state: NodeState
    target: str
    report: NodeReport | None


class ClusterView:
    """Finds the nodes behind the targets and keeps a link to each. Owned by the event loop.

    Model, limits, tokenizer and fingerprint come from the first prefill or decode node
    that serves; a node with another fingerprint is refused.
    """

    def __init__(
        self,
        config: RouterConfig,
        identity: RouterIdentity,
        *,
        resolver: Resolver = resolve_with_dns,
        on_lost: Callable[[NodeRole], None] = lambda _role: None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._resolver = resolver
        self._on_lost = on_lost
        self._targets = [
            *((NodeRole.PREFILL, target) for target in config.prefill_targets),
            *((NodeRole.DECODE, target) for target in config.decode_targets),
            *((NodeRole.DRAFT, target) for target in config.draft_targets),
        ]
        self._links: dict[tuple[NodeRole, str], NodeLink] = {}
        self._tasks: dict[tuple[NodeRole, str], asyncio.Task[None]] = {}
        self._lookup: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()
        self._has_model = asyncio.Event()
        self._changed = asyncio.Event()
        self._on_change: list[Callable[[], None]] = []
        self._first_of_numerics: dict[str, str] = {}  # by numerics: the first node that computes so
        self.served: ServedModel | None = None

    # ------------------------------------------------------------ what others ask

    @property
    def prefill_nodes(self) -> list[PrefillLink]:
        return [link for link in self._links.values() if isinstance(link, PrefillLink) and link.is_serving]

    @property
    def decode_nodes(self) -> list[DecodeLink]:
        """Those whose session is open."""
        return [
            link
            for link in self._links.values()
            if isinstance(link, DecodeLink) and link.is_serving and link.session is not None and link.session.is_open
        ]

    def model(self) -> ServedModel:
        """Raises: PeerLostError while no node has served yet."""
        if self.served is None:
            raise PeerLostError("no node serves a model yet", reason="NO_NODE")
        return self.served

    def proposer(self) -> tuple[str, int]:
        """(the proposer in force, the default number of speculative tokens).

        A draft node's proposer where one serves, else the decode nodes' own; how many are
        asked for is the decode nodes' choice.
        """
        drafts = [link for link in self._links.values() if link.role is NodeRole.DRAFT and link.is_serving]
        decodes = self.decode_nodes
        names = [model.proposer for model in _models((*drafts, *decodes)) if model.proposer]
        numbers = [model.num_speculative_tokens for model in _models((*decodes, *drafts))]
        return next(iter(names), ""), next(iter(numbers), 0)

    def statuses(self) -> list[NodeStatus]:
        """Every node, by role and name; names are unique."""
        found: list[NodeStatus] = []
        names: set[str] = set()
        for link in sorted(self._links.values(), key=lambda link: (link.role.value, link.name, link.address)):
            if link.is_alias:
                continue
            name = link.name if link.name not in names else f"{link.name}@{link.address}"
            names.add(name)
            found.append(
                NodeStatus(name=name, role=link.role, state=link.state, target=link.address, report=link.report)
            )
        return found

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every report, and when nodes come and go. It must not block."""
        self._on_change.append(listener)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self._lookup = asyncio.create_task(self._look_up_targets(), name="look up targets")

    async def wait_until_serving(self) -> None:
        """Until a prefill node and a decode node serve; says what it waits for."""
        while missing := self._missing():
            self._changed.clear()
            try:
                async with asyncio.timeout(WAITING_LOG_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                refusals = {link.name: link.refusal for link in self._links.values() if link.refusal}
                _log.info("waiting for nodes", missing=missing, refused=refusals)

    async def stop(self) -> None:
        """Ends every link; their listeners are told. A second call does nothing."""
        tasks = {task for task in (self._lookup, *self._tasks.values()) if task is not None}
        while tasks:
            for task in tasks:
                task.cancel()
            # Python 3.11's wait_for loses a cancellation that comes together with a result: ask again.
            _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_SECONDS)
        self._tasks.clear()
        self._links.clear()
        if self.served is not None:
            self.served.tokenizer.close()

    def _missing(self) -> list[str]:
        found = (("a prefill node", self.prefill_nodes), ("a decode node", self.decode_nodes))
        return [what for what, nodes in found if not nodes]

    # ------------------------------------------------------------ targets

    async def _look_up_targets(self) -> None:
        while True:
            for role, target in self._targets:
                try:
                    addresses = await self._resolver(target)
                except OSError as error:
                    _log.debug("target is not resolved", target=target, error=str(error))
                    addresses = []
                self._take_addresses(role, target, addresses)
            await asyncio.sleep(self._config.resolve_interval_seconds)

    def _take_addresses(self, role: NodeRole, target: str, addresses: Iterable[str]) -> None:
        """Links for new addresses; a link whose address is gone is dropped once its node does not serve.

        A name that resolves to nothing is listed as one node, which gRPC itself goes on looking up.
        """
        known = {link.address for link in self._links.values() if link.role is role and link.target == target}
        wanted = set(addresses) or known or {target}
        for address in sorted(wanted - known):
            if (role, address) not in self._links:
                self._add_link(role, target, address)
        for address in known - wanted:
            if not self._links[role, address].is_serving:
                self._tasks.pop((role, address)).cancel()
                del self._links[role, address]

    def _add_link(self, role: NodeRole, target: str, address: str) -> None:
        kind = {NodeRole.PREFILL: PrefillLink, NodeRole.DECODE: DecodeLink, NodeRole.DRAFT: NodeLink}[role]
        link = kind(
            role=role,
            target=target,
            address=address,
            channel=open_channel(address, tls=self._config.node_tls),
            identity=self._identity,
            approve=self._approve,
            on_change=self._changed_now,
            on_lost=lambda link, _error: self._on_lost(link.role),
            liveness_timeout_seconds=self._config.liveness_timeout_seconds,
        )
        self._links[role, address] = link
        self._tasks[role, address] = asyncio.create_task(link.run(), name=f"link to {address}")

    def _changed_now(self) -> None:
        self._changed.set()
        for listener in self._on_change:
            listener()

    # ------------------------------------------------------------ approval

    async def _approve(self, link: NodeLink, info: NodeInfo) -> str:
        """The fingerprint served. Raises: MismatchError naming both sides; OutriderError when the tokenizer fails."""
        if info.model is None:
            raise MismatchError(f"{info.name} serves no model")
        link.is_alias = any(
            other is not link
            and not other.is_alias
            and other.state is not NodeState.LOST
            and other.info is not None
            and other.info.incarnation == info.incarnation
            for other in self._links.values()
        )
        if link.role is NodeRole.DRAFT:
            await self._has_model.wait()
            self._check_vocabulary(info.name, info.model)
            return info.model.fingerprint
        async with self._adopting:
            if self.served is None:
                self.served = await self._adopt(link, info.name, info.model)
                self._has_model.set()
        served = self.served
        if info.model.fingerprint != served.info.fingerprint:
            raise MismatchError(
                f"{info.name} serves {info.model.name} with fingerprint {info.model.fingerprint}, this router"
                f" {served.info.name} with fingerprint {served.info.fingerprint} (from {served.node})"
            )
        self._compare_numerics(info.name, info.model.numerics)
        return served.info.fingerprint

    def _compare_numerics(self, name: str, numerics: str) -> None:
        """Nodes that compute differently serve together; what that weakens is said once for each kind."""
        if not numerics or numerics in self._first_of_numerics:
            return
        self._first_of_numerics[numerics] = name
        if len(self._first_of_numerics) > 1:
            _log.warning(
                "nodes of different numerics serve together: an answer that moves between them may differ"
                " from one that does not",
                numerics={node: kind for kind, node in self._first_of_numerics.items()},
            )

    def _check_vocabulary(self, name: str, model: ModelInfo) -> None:
        served = self.served
        if served is None or not model.vocabulary_fingerprint or not served.info.vocabulary_fingerprint:
            return
        if model.vocabulary_fingerprint != served.info.vocabulary_fingerprint:
            raise MismatchError(
                f"{name} drafts with vocabulary {model.vocabulary_fingerprint}, the target model has"
                f" {served.info.vocabulary_fingerprint} (from {served.node})"
            )

    async def _adopt(self, link: NodeLink, name: str, model: ModelInfo) -> ServedModel:
        files = await link.watcher.get_tokenizer()
        tokenizer = await asyncio.to_thread(Tokenizer, files, num_threads=self._config.tokenizer_threads)
        _log.info("model found", model=model.name, fingerprint=model.fingerprint, node=name)
        return ServedModel(model, tokenizer, name)


def _models(links: Iterable[NodeLink]) -> list[ModelInfo]:
    return [link.info.model for link in links if link.info is not None and link.info.model is not None]
