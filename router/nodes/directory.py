"""All nodes behind the router's targets, and the model that they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from outrider.errors import MismatchError, PeerLostError
from outrider.heap import trim_heap
from outrider.model_hub.checkpoint_text import read_text, resolved_files
from outrider.node import ModelInfo, NodeInfo, NodeLoad, NodeRole, NodeState, NodeStatus
from outrider.rpc.tls import PLAINTEXT, PeerSecurity
from outrider.service.peers import PeerSet
from outrider.service.resolver import Resolver, resolve_with_dns
from outrider.service.telemetry.logging import get_logger
from router.config import RouterConfig
from router.nodes.adapters import ClusterAdapters
from router.nodes.link import DecodeLink, NodeLink, PrefillLink, shorten_condition
from router.nodes.transport import NodeTransport, RouterIdentity, racing
from router.text.constraint_checker import ConstraintChecker
from router.text.tokenizer import Tokenizer

WAITING_LOG_SECONDS = 5.0
PREFILL_START_SECONDS = 5.0
"""Seconds that a starting router waits for a prefill node once a decode node serves.

Both nodes load the same weights, so they should need about the same time.
"""

EXACT_NUMERICS = "exact ("

_log = get_logger("nodes")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of the first prefill or decode node that served."""

    info: ModelInfo  # with the shortest context window of all nodes
    tokenizer: Tokenizer
    default_sampling: Mapping[str, float]  # fields of SamplingParams that the checkpoint's generation_config.json sets
    tokenizer_files: Mapping[str, bytes]  # for gateways: contents by file name, from `resolved_files`
    constraints: ConstraintChecker
    node: str  # name of the node that the model came from


class NodeDirectory:
    """Links to all nodes behind the targets, and the model that they serve. Owned by the event loop.

    Model, limits, tokenizer and fingerprint come from the first prefill or decode node that serves. A node with
    another fingerprint is refused. A node is also refused if the features that it computes for a drafter head differ
    from those of the nodes in use, because the prompt's features go to decode nodes together with its KV. The nodes'
    context windows may differ, because they depend on memory; the shortest one is served.
    """

    def __init__(
        self,
        config: RouterConfig,
        identity: RouterIdentity,
        *,
        resolver: Resolver = resolve_with_dns,
        security: PeerSecurity = PLAINTEXT,
        on_lost: Callable[[NodeRole], None] = lambda _role: None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._security = security
        self._on_lost = on_lost
        self._nodes = {
            role: PeerSet(
                targets,
                open_peer=partial(self._open_link, role),
                resolver=resolver,
                interval_seconds=config.resolve_interval_seconds,
                on_change=self.on_link_change,
            )
            for role, targets in (
                (NodeRole.PREFILL, config.prefill_targets),
                (NodeRole.DECODE, config.decode_targets),
                (NodeRole.DRAFT, config.draft_targets),
            )
        }
        self._adopting = asyncio.Lock()
        self._has_model = asyncio.Event()
        self._changed = asyncio.Event()
        self._on_change: list[Callable[[], None]] = []
        self._on_report: list[Callable[[], None]] = []
        self._first_of_numerics: dict[str, str] = {}  # by numerics: the name of the first node that has them
        self.served: ServedModel | None = None
        self.prefill_nodes: list[PrefillLink] = []  # this list and the next two contain only serving nodes
        self.decode_nodes: list[DecodeLink] = []
        self.late_nodes: list[NodeLink] = []
        self.adapters = ClusterAdapters()

    # ------------------------------------------------------------ queries

    def model(self) -> ServedModel:
        """Returns the served model. Raises: PeerLostError while no node has served yet."""
        if self.served is None:
            raise PeerLostError("no node serves a model yet", reason="NO_NODE")
        return self.served

    def exact_numerics(self) -> str:
        """Returns the numerics of all serving nodes if they are the same and exact, else an empty string."""
        kinds = {link.numerics for link in (*self.decode_nodes, *self.prefill_nodes)}
        numerics = kinds.pop() if len(kinds) == 1 else ""
        return numerics if numerics.startswith(EXACT_NUMERICS) else ""

    def proposer(self) -> tuple[str, int]:
        """Returns (the proposer in use, the default number of speculative tokens).

        A model or a head is preferred to lookup; otherwise a draft node's proposer is preferred to a decode node's.
        The number comes from a decode node.
        """
        drafts = [link for link in self._links() if link.role is NodeRole.DRAFT and link.is_serving]
        decodes = self.decode_nodes
        names = [model.proposer for model in _models((*drafts, *decodes)) if model.proposer]
        numbers = [model.num_speculative_tokens for model in _models(decodes)]
        return max(names, key=lambda name: ":" in name, default=""), next(iter(numbers), 0)

    @property
    def has_unready_decode_target(self) -> bool:
        """Whether a decode target has no address, or has a node that neither serves nor was refused."""
        nodes = self._nodes[NodeRole.DECODE]
        return bool(nodes.unresolved) or any(
            not (link.is_serving or link.refusal or link.is_alias) for link in nodes.peers
        )

    def statuses(self) -> list[NodeStatus]:
        """Returns all nodes by role and name; names are unique. A target without an address counts as one node."""
        found: list[NodeStatus] = []
        names: set[str] = set()
        for role, nodes in self._nodes.items():
            prefix = role.name.lower()
            found += [
                NodeStatus(
                    name=f"{prefix}@{target}",
                    role=role,
                    state=NodeState.STARTING,
                    target=target,
                    condition=shorten_condition(f"unreachable: {why}"),
                )
                for target, why in nodes.unresolved.items()
            ]
            for link in sorted(nodes.peers, key=lambda link: (link.name, link.address)):
                if not link.is_alias:
                    name = link.name if link.name not in names else f"{link.name}@{link.address}"
                    names.add(name)
                    found.append(_status_of(link, name))
        return found

    def link_of(self, status: NodeStatus) -> NodeLink | None:
        """Returns the link of a status; None for a target without an address."""
        return None if status.role is None else self._nodes[status.role].find(status.target)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Adds a listener, which is called when nodes come, go or change their liveness state. It must not block."""
        self._on_change.append(listener)

    def on_report(self, listener: Callable[[], None]) -> None:
        """Adds a listener, which is called at changes and after each report, many times a second. It must not block."""
        self._on_change.append(listener)
        self._on_report.append(listener)

    # ------------------------------------------------------------ lifecycle

    def start(self) -> None:
        for nodes in self._nodes.values():
            nodes.start()

    async def wait_until_serving(self) -> None:
        """Waits for a decode node, then up to `PREFILL_START_SECONDS` for a prefill node. Logs what is missing."""
        loop = asyncio.get_running_loop()
        log_at = loop.time() + WAITING_LOG_SECONDS
        until: float | None = None  # deadline for prefill nodes, set once a decode node serves
        while missing := self._missing():
            if self.decode_nodes:
                until = loop.time() + PREFILL_START_SECONDS if until is None else until
                if loop.time() >= until or not self._config.prefill_targets:
                    _log.warning("no prefill node serves; decode nodes compute prompts", **self._reasons_to_wait())
                    return
                log_at = min(log_at, until)
            self._changed.clear()
            try:
                # The deadline is absolute, because failed connections set `_changed`, too, and must not delay the log.
                async with asyncio.timeout_at(log_at):
                    await self._changed.wait()
            except TimeoutError:
                _log.info("waiting for nodes", missing=missing, **self._reasons_to_wait())
                log_at = loop.time() + WAITING_LOG_SECONDS

    async def stop(self) -> None:
        """Ends every link and notifies its listeners. Idempotent."""
        await asyncio.gather(*(nodes.stop() for nodes in self._nodes.values()))
        await self.adapters.stop()
        if self.served is not None:
            self.served.tokenizer.close()
            self.served.constraints.close()

    def _missing(self) -> list[str]:
        found = (("a prefill node", self.prefill_nodes), ("a decode node", self.decode_nodes))
        return [what for what, nodes in found if not nodes]

    def _reasons_to_wait(self) -> dict[str, dict[str, str]]:
        """Returns why nodes do not serve and targets do not resolve."""
        links = [link for link in self._links() if not link.is_serving]
        return {
            "unresolved": {target: why for nodes in self._nodes.values() for target, why in nodes.unresolved.items()},
            "unreachable": {link.address: link.last_error for link in links if link.last_error},
            "refused": {link.name: link.refusal for link in links if link.refusal},
        }

    # ------------------------------------------------------------ links

    def _links(self) -> list[NodeLink]:
        return [link for nodes in self._nodes.values() for link in nodes.peers]

    def _open_link(self, role: NodeRole, _target: str, address: str) -> NodeLink:
        kind = {NodeRole.PREFILL: PrefillLink, NodeRole.DECODE: DecodeLink, NodeRole.DRAFT: NodeLink}[role]
        return kind(
            role=role,
            address=address,
            transport=NodeTransport(self._security, address=address),
            identity=self._identity,
            owner=self,
            liveness_timeout_seconds=self._config.liveness_timeout_seconds,
        )

    def on_link_change(self) -> None:
        """Implements `LinkOwner`, as do the next two methods."""
        serving = [link for link in self._links() if link.is_serving]
        self.prefill_nodes = [link for link in serving if isinstance(link, PrefillLink)]
        self.decode_nodes = [link for link in serving if isinstance(link, DecodeLink)]
        self.late_nodes = [link for link in (*self.decode_nodes, *self.prefill_nodes) if link.is_late]
        self._follow_windows()
        self.adapters.follow((*self.decode_nodes, *self.prefill_nodes))
        self._changed.set()
        for listener in self._on_change:
            listener()

    def on_link_report(self) -> None:
        for listener in self._on_report:
            listener()

    def on_link_loss(self, link: NodeLink) -> None:
        self._on_lost(link.role)

    def _follow_windows(self) -> None:
        """Serves the shortest context window of all nodes, even disconnected ones, so that a request fits any node."""
        windows = {link.max_model_len: link.name for link in self._links() if link.max_model_len}
        if self.served is None or not windows or min(windows) == self.served.info.max_model_len:
            return
        self.served = replace(self.served, info=replace(self.served.info, max_model_len=min(windows)))
        _log.warning("context window changed", max_model_len=min(windows), node=windows[min(windows)])

    # ------------------------------------------------------------ approval

    async def approve(self, link: NodeLink, info: NodeInfo) -> str:
        """Returns the served model's fingerprint, or for a draft node the fingerprint of its own model.

        Raises: MismatchError, whose message names both nodes, if the node does not fit; OutriderError if the tokenizer
        cannot be read.
        """
        if info.model is None:
            raise MismatchError(f"{info.name} serves no model")
        link.is_alias = any(
            other is not link
            and not other.is_alias
            and other.state is not NodeState.LOST
            and other.info is not None
            and other.info.incarnation == info.incarnation
            for other in self._links()
        )
        if link.role is NodeRole.DRAFT:
            await self._has_model.wait()
            self._check_vocabulary(info.name, info.model)
            return info.model.fingerprint
        if self.served is None:
            await self._adopt(link, info.name, info.model)
        served = self.model()
        if info.model.fingerprint != served.info.fingerprint:
            raise MismatchError(_describe_difference(info.name, info.model, served))
        self._check_features(link, info.name, info.model)
        self._compare_numerics(info.name, info.model.numerics)
        link.max_model_len = info.model.max_model_len
        return served.info.fingerprint

    def _compare_numerics(self, name: str, numerics: str) -> None:
        """Logs a warning when a node has numerics that no node had before. Different numerics are permitted."""
        if not numerics or numerics in self._first_of_numerics:
            return
        self._first_of_numerics[numerics] = name
        if len(self._first_of_numerics) > 1:
            _log.warning(
                "nodes of different numerics serve together: an answer that migrates between them may differ"
                " from one that does not",
                numerics={node: kind for kind, node in self._first_of_numerics.items()},
            )

    def _check_features(self, link: NodeLink, name: str, model: ModelInfo) -> None:
        for other in self._links():
            found = other.info.model if other.info is not None else None
            is_paired = other is not link and other.is_approved and other.role is not NodeRole.DRAFT
            if is_paired and found is not None and found.features != model.features:
                raise MismatchError(
                    f"{name} computes features {model.features or 'none'} for a drafter head, {other.name} computes"
                    f" {found.features or 'none'}: model.head of all prefill and decode nodes must have one reduction"
                )

    def _check_vocabulary(self, name: str, model: ModelInfo) -> None:
        served = self.served
        if served is None or not model.vocabulary_fingerprint or not served.info.vocabulary_fingerprint:
            return
        if model.vocabulary_fingerprint != served.info.vocabulary_fingerprint:
            raise MismatchError(
                f"{name} drafts with the vocabulary of {model.name} ({model.vocab_size} tokens), {served.node} has that"
                f" of {served.info.name} ({served.info.vocab_size} tokens): drafters need the target's tokenizer"
            )

    async def _adopt(self, link: NodeLink, name: str, model: ModelInfo) -> None:
        """Adopts the model of the first node that sends its tokenizer. A node that stalls does not block the others."""
        async with racing(link.transport.tokenizer_files(), self._has_model.wait()) as (sent, _), self._adopting:
            if self.served is not None:
                return
            files = sent.result()
            text = await asyncio.to_thread(read_text, files)
            tokenizer = await asyncio.to_thread(Tokenizer, text, num_threads=self._config.tokenizer_threads)
            _log.info("model found", model=model.name, fingerprint=model.fingerprint, node=name)
            constraints = ConstraintChecker(text.tokenizer_json, model)
            resolved = resolved_files(files, text)
            self.served = ServedModel(model, tokenizer, text.default_sampling, resolved, constraints, name)
            del text  # with its vocabulary, which takes tens of megabytes
            await asyncio.to_thread(trim_heap)
            self._has_model.set()


def _describe_difference(name: str, model: ModelInfo, served: ServedModel) -> str:
    """Explains in terms of settings why the nodes' KV is incompatible. The nodes' logs have the fingerprints."""
    ours, node = served.info, served.node
    if model.name != ours.name or model.vocab_size != ours.vocab_size:
        return f"{name} serves {model.name} ({model.vocab_size} tokens), {node} {ours.name} ({ours.vocab_size} tokens)"
    if model.dtype != ours.dtype:
        same = "model.dtype of all prefill and decode nodes must be the same"
        return f"{name} computes {model.name} in {model.dtype}, {node} in {ours.dtype}: {same}"
    if model.revision != ours.revision:
        return f"{name} serves revision {model.revision or '?'} of {model.name}, {node} {ours.revision or '?'}"
    return f"{name} has different weights, configuration or tokenizer of {model.name} than {node}"


def _models(links: Iterable[NodeLink]) -> list[ModelInfo]:
    return [link.info.model for link in links if link.info is not None and link.info.model is not None]


def _status_of(link: NodeLink, name: str) -> NodeStatus:
    report = link.report  # None while no reports arrive
    return NodeStatus(
        name=name,
        role=link.role,
        state=link.state,
        target=link.address,
        step=0 if report is None else report.num_steps,
        load=NodeLoad() if report is None else report.load,
        condition=link.condition,
    )
