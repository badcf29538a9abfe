"""READ FIRST. The draft node's engine thread: receive newest states → catch up → propose → push.

One thread runs `DraftLoop.step` repeatedly, for all decode nodes together. The event loop (`server`)
only moves messages between the streams and the peers' boxes. No state here is essential: lost state is
sent again where a prefix is not known, and a decode node that hears nothing continues without drafts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_node.draft_peer import DraftPeer
from draft_node.held_sequences import HeldSequence, HeldSequences
from outrider.node import NodeLoad
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import (
    DraftHello,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
    most_tokens_offered,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import Proposal, ProposalRequest, Proposer
from outrider.speculation.proposers.isolated import IsolatedProposer

RATE_WINDOW_SECONDS = 10.0
IDLE_SECONDS = 0.5

_log = get_logger("draft_loop")

Answers = list[tuple[DraftPeer, SequenceProposals]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How much the node offers and holds."""

    num_speculative_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStepStats:
    """One step, for reports and metrics."""

    seconds: float
    num_updates: int
    num_refused: int
    num_held: int  # sequences
    num_waiting: int  # of them, not caught up yet
    num_requests: int
    num_proposed_tokens: int


class DraftLoop:
    """Owns the proposer and the tokens held; nothing else touches either.

    `connect`, `disconnect`, `submit` and `load` may be called from any thread; `step`
    and `run` belong to one.
    """

    def __init__(
        self,
        proposer: Proposer,
        limits: DraftLimits,
        *,
        on_step: Callable[[DraftStepStats], None] = lambda _stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = IsolatedProposer(proposer, on_failure=self._log_failure, clock=clock)
        self._limits = limits
        self._on_step = on_step
        self._clock = clock
        self._held = HeldSequences(max_sequences=limits.max_sequences, on_forgotten=self._proposer.forget)
        self._pending: dict[int, HeldSequence] = {}  # by key: want a proposal, or to be caught up with
        self._changed = threading.Condition()
        self._peers: dict[int, DraftPeer] = {}
        self._gone: list[int] = []
        self._next_peer_id = 0
        self._has_news = False
        self._is_stopping = False
        self._proposed: deque[tuple[float, int]] = deque()
        self._num_running = 0
        self.num_steps = 0
        self.num_refused = 0
        self.step_started_at: float | None = None
        self.last_step_seconds = 0.0

    # Any thread.

    def connect(self, hello: DraftHello, notify: Callable[[], None]) -> DraftPeer:
        """A decode node's stream is up. `notify` is called when there are answers to take."""
        with self._changed:
            peer = DraftPeer(self._next_peer_id, hello, notify)
            self._next_peer_id += 1
            self._peers[peer.peer_id] = peer
        return peer

    def disconnect(self, peer: DraftPeer) -> None:
        """The stream is gone, and with it everything that was held for it."""
        with self._changed:
            if self._peers.pop(peer.peer_id, None) is not None:
                self._gone.append(peer.peer_id)
            self._wake()

    def submit(self, peer: DraftPeer, updates: Sequence[SequenceUpdate]) -> None:
        """Newest states have come."""
        peer.submit(updates)
        with self._changed:
            self._wake()

    def stop(self) -> None:
        """Lets `run` return after the step at hand."""
        with self._changed:
            self._is_stopping = True
            self._wake()

    def load(self) -> NodeLoad:
        now = self._clock()
        recent = sum(num_tokens for at, num_tokens in list(self._proposed) if now - at <= RATE_WINDOW_SECONDS)
        return NodeLoad(num_running=self._num_running, tokens_per_second=recent / RATE_WINDOW_SECONDS)

    # The draft loop's thread.

    def run(self) -> None:
        """Steps whenever there is something to do, until `stop`."""
        while True:
            with self._changed:
                while not (self._has_news or self._pending or self._is_stopping):
                    self._changed.wait(IDLE_SECONDS)
                if self._is_stopping:
                    return
            self._on_step(self.step())

    def step(self) -> DraftStepStats:
        """Newest states in, proposals out. What is not caught up yet stays for the next step."""
        self.step_started_at = started = self._clock()
        updates = self._take_updates()  # the newest state of every sequence that moved
        refused = self._apply(updates)  # unknown prefixes, no room, nonsense
        requests = self._requests()  # who wants drafts, or only to be kept up with
        proposals = self._proposer.propose(requests)  # bounded work: long prefixes take several steps
        answers = self._answers(proposals)
        self._push([*refused, *answers])
        return self._finish(started, len(updates), len(refused), proposals)

    def _take_updates(self) -> list[tuple[DraftPeer, SequenceUpdate]]:
        with self._changed:
            self._has_news = False
            peers = list(self._peers.values())
            gone, self._gone = self._gone, []
        for peer_id in gone:
            self._held.close_peer(peer_id)
        if gone:
            self._pending = {key: held for key, held in self._pending.items() if held.name[0] not in gone}
        return [(peer, update) for peer in peers for update in peer.take_updates()]

    def _apply(self, updates: Sequence[tuple[DraftPeer, SequenceUpdate]]) -> Answers:
        refused: Answers = []
        for peer, update in updates:
            name = (peer.peer_id, update.sequence_id)
            before = self._held.get(name)
            if before is not None:
                self._pending.pop(before.key, None)
            if update.closed:
                self._held.close(name)
                continue
            outcome = self._held.apply(peer.peer_id, peer.hello, update)
            if isinstance(outcome, DraftStatus):
                refused.append((peer, SequenceProposals(sequence_id=update.sequence_id, status=outcome)))
            else:
                self._pending[outcome.key] = outcome
        return refused

    def _requests(self) -> list[ProposalRequest]:
        return [
            ProposalRequest(held.key, held.tokens.token_ids, self._num_offered(held), held.start)
            for held in self._pending.values()
        ]

    def _num_offered(self, held: HeldSequence) -> int:
        """What is wanted and some more, but nothing past the sequence's end."""
        if held.num_wanted <= 0:
            return 0
        wanted = min(held.num_wanted, self._limits.num_speculative_tokens)
        offered = min(wanted + self._proposer.num_extra_tokens, most_tokens_offered(wanted))
        num_left = held.start.prompt_length + held.start.params.max_tokens - len(held.tokens)
        return max(0, min(offered, num_left))

    def _log_failure(self, error: Exception, keys: Sequence[int]) -> None:
        _log.error(
            "proposer failed", proposer=self._proposer.name, num_sequences=len(keys), error=str(error), exc_info=error
        )

    def _answers(self, proposals: Sequence[Proposal]) -> Answers:
        answers: Answers = []
        for proposal in proposals:
            held = self._pending[proposal.sequence_id]
            if proposal.caught_up:
                del self._pending[proposal.sequence_id]
            peer = self._peers.get(held.name[0])
            if peer is None:
                continue
            tree = replace(
                proposal.tree.cut(_num_known_to(peer.hello, proposal.tree)),
                prefix_hash=held.tokens.hash_at(proposal.tree.length),
            )
            answer = SequenceProposals(
                sequence_id=held.name[1],
                status=_status(proposal, tree),
                acked_length=len(held.tokens),
                branches=(tree,) if tree else (),
                num_computed=proposal.num_computed,
            )
            answers.append((peer, answer))
        return answers

    def _push(self, answers: Answers) -> None:
        by_peer: dict[int, tuple[DraftPeer, list[SequenceProposals]]] = {}
        for peer, answer in answers:
            by_peer.setdefault(peer.peer_id, (peer, []))[1].append(answer)
        for peer, theirs in by_peer.values():
            peer.answer(theirs)

    def _finish(
        self, started: float, num_updates: int, num_refused: int, proposals: Sequence[Proposal]
    ) -> DraftStepStats:
        now = self._clock()
        num_tokens = sum(len(proposal.tree) for proposal in proposals)
        self._proposed.append((now, num_tokens))
        while self._proposed and now - self._proposed[0][0] > RATE_WINDOW_SECONDS:
            self._proposed.popleft()
        self._num_running = len(self._held)
        self.num_steps += 1
        self.num_refused += num_refused
        self.last_step_seconds = now - started
        self.step_started_at = None
        return DraftStepStats(
            seconds=now - started,
            num_updates=num_updates,
            num_refused=num_refused,
            num_held=self._num_running,
            num_waiting=len(self._pending),
            num_requests=len(proposals),
            num_proposed_tokens=num_tokens,
        )

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify_all()


def _status(proposal: Proposal, tree: DraftTree) -> DraftStatus:
    if not proposal.caught_up:
        return DraftStatus.CATCHING_UP
    return DraftStatus.PROPOSED if tree else DraftStatus.NOTHING


def _num_known_to(hello: DraftHello, tree: DraftTree) -> int:
    """Tokens before the first id that the decode node's model does not have: padded sizes may differ."""
    return next(
        (index for index, token_id in enumerate(tree.token_ids) if token_id >= hello.vocab_size), len(tree.token_ids)
    )
