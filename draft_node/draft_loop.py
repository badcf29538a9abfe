"""READ FIRST. The draft node's engine thread: receive newest states → catch up → propose → look ahead → push.

One thread runs `DraftLoop.step` repeatedly, for all decode nodes together. A step makes at most one forward
pass, so that a new state waits for no more than that. Sequences that wait for a draft come first. While the
targets of the others verify, their next drafts are made ahead, until each target is expected to be done.

The event loop (`server`) only moves messages between the streams and the peers' boxes. No state here is
essential: lost state is sent again where a prefix is not known, and a decode node that hears nothing
continues without drafts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_node.draft_peer import DraftPeer, ReceivedUpdate
from draft_node.held_sequences import HeldSequence, HeldSequences
from outrider.node import NodeLoad
from outrider.service.telemetry.logging import get_logger
from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    DraftHello,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
    most_tokens_offered,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import AheadBranch, Progress, Proposal, ProposalRequest, Proposer
from outrider.speculation.proposers.isolated import IsolatedProposer

RATE_WINDOW_SECONDS = 10.0
IDLE_SECONDS = 0.5

ROUND_SMOOTHING = 0.2
FADING = 0.95

_log = get_logger("draft_loop")

Answers = list[tuple[DraftPeer, SequenceProposals]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How much the node offers and holds."""

    num_speculative_tokens: int
    max_sequences: int
    max_alternatives: int = 0  # of a sequence, while its target verifies; 0: no look-ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStepStats:
    """One step, for reports and metrics."""

    seconds: float
    num_updates: int
    num_refused: int
    num_held: int  # sequences
    num_waiting: int  # of them, not caught up yet
    num_requests: int
    num_proposed_tokens: int  # in drafts that were waited for
    num_ahead_tokens: int = 0  # in branches ahead, those sent again when they had grown included
    num_wasted_tokens: int = 0  # drafted by a model, and now known never to be committed


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
        self._ahead: dict[int, HeldSequence] = {}  # by key: answered, and their target verifies
        self._ahead_seconds = 0.0  # running mean of a step that only looks ahead
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

    def submit(self, peer: DraftPeer, updates: Sequence[SequenceUpdate], *, step_seconds: float = 0.0) -> None:
        """Newest states have come. `step_seconds`: how long their target will verify; 0: unknown."""
        peer.submit(updates, verified_by=self._clock() + step_seconds)
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

    @property
    def has_work(self) -> bool:
        """Whether a step would find anything to do."""
        return bool(self._has_news or self._pending or self._ahead)

    def run(self) -> None:
        """Steps whenever there is something to do, until `stop`."""
        while True:
            with self._changed:
                while not (self.has_work or self._is_stopping):
                    self._changed.wait(IDLE_SECONDS)
                if self._is_stopping:
                    return
            self._on_step(self.step())

    def step(self) -> DraftStepStats:
        """Newest states in, proposals out. What is not drafted yet stays for the next step."""
        self.step_started_at = started = self._clock()
        updates = self._take_updates()  # the newest state of every sequence that moved
        refused = self._apply(updates)  # unknown prefixes, no room, nonsense
        requests = self._requests(started)  # who waits for a draft, then whose target verifies
        num_wasted = self._proposer.num_wasted_tokens
        proposals = self._proposer.propose(requests)  # bounded work: at most one forward
        answers = self._answers(requests, proposals)
        self._push([*refused, *answers])
        self._learn_time(requests, self._clock() - started)
        num_wasted = self._proposer.num_wasted_tokens - num_wasted
        return self._finish(started, len(updates), len(refused), len(requests), answers, num_wasted)

    def _learn_time(self, requests: Sequence[ProposalRequest], seconds: float) -> None:
        """How long a step that only looks ahead takes. While there are none, an estimate that forbids them fades."""
        if requests and requests[0].looks_ahead:
            weight = ROUND_SMOOTHING if self._ahead_seconds > 0.0 else 1.0
            self._ahead_seconds += weight * (seconds - self._ahead_seconds)
        else:
            self._ahead_seconds *= FADING

    def _take_updates(self) -> list[tuple[DraftPeer, ReceivedUpdate]]:
        with self._changed:
            self._has_news = False
            peers = list(self._peers.values())
            gone, self._gone = self._gone, []
        for peer_id in gone:
            self._held.close_peer(peer_id)
        if gone:
            self._pending = {key: held for key, held in self._pending.items() if held.name[0] not in gone}
            self._ahead = {key: held for key, held in self._ahead.items() if held.name[0] not in gone}
        return [(peer, update) for peer in peers for update in peer.take_updates()]

    def _apply(self, updates: Sequence[tuple[DraftPeer, ReceivedUpdate]]) -> Answers:
        refused: Answers = []
        for peer, received in updates:
            update = received.update
            name = (peer.peer_id, update.sequence_id)
            before = self._held.get(name)
            if before is not None:
                self._pending.pop(before.key, None)
                self._ahead.pop(before.key, None)
            if update.closed:
                self._held.close(name)
                continue
            outcome = self._held.apply(peer.peer_id, peer.hello, update)
            if isinstance(outcome, DraftStatus):
                refused.append((peer, SequenceProposals(sequence_id=update.sequence_id, status=outcome)))
            else:
                outcome.verified_by = received.verified_by
                outcome.num_branches_left = MAX_AHEAD_BRANCHES
                self._pending[outcome.key] = outcome
        return refused

    def _requests(self, now: float) -> list[ProposalRequest]:
        """Whoever waits, first. No look-ahead is begun that would not be over when its target is."""
        self._ahead = {key: held for key, held in self._ahead.items() if self._may_look_ahead(held, now)}
        return [
            *(self._request(held, now, looks_ahead=False) for held in self._pending.values()),
            *(self._request(held, now, looks_ahead=True) for held in self._ahead.values()),
        ]

    def _request(self, held: HeldSequence, now: float, *, looks_ahead: bool) -> ProposalRequest:
        max_alternatives = self._limits.max_alternatives if self._may_look_ahead(held, now) else 0
        return ProposalRequest(
            sequence_id=held.key,
            token_ids=held.tokens.token_ids,
            num_wanted=self._num_offered(held, looks_ahead=max_alternatives > 0),
            start=held.start,
            max_alternatives=max_alternatives,
            looks_ahead=looks_ahead,
            owner=held.name[0],
        )

    def _may_look_ahead(self, held: HeldSequence, now: float) -> bool:
        """Whether what is begun now is over when the target is."""
        is_able = self._limits.max_alternatives > 0 and self._proposer.can_look_ahead
        return is_able and held.num_wanted > 0 and now + self._ahead_seconds < held.verified_by

    def _num_offered(self, held: HeldSequence, *, looks_ahead: bool) -> int:
        """What is wanted and, where nothing more follows by look-ahead, some more; but nothing past the end."""
        if held.num_wanted <= 0:
            return 0
        offered = wanted = min(held.num_wanted, self._limits.num_speculative_tokens)
        if not looks_ahead:
            offered = min(wanted + self._proposer.num_extra_tokens, most_tokens_offered(wanted))
        num_left = held.start.prompt_length + held.start.params.max_tokens - len(held.tokens)
        return max(0, min(offered, num_left))

    def _log_failure(self, error: Exception, keys: Sequence[int]) -> None:
        _log.error(
            "proposer failed", proposer=self._proposer.name, num_sequences=len(keys), error=str(error), exc_info=error
        )

    def _answers(self, requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]) -> Answers:
        answers: Answers = []
        for request, proposal in zip(requests, proposals, strict=True):
            held = (self._ahead if request.looks_ahead else self._pending)[proposal.sequence_id]
            peer = self._peers.get(held.name[0])
            if peer is None:
                continue  # its end is news: everything of it is dropped by the next step
            answer = (
                self._branches(peer, held, proposal)
                if request.looks_ahead
                else self._draft(peer, held, request, proposal)
            )
            if answer is not None:
                answers.append((peer, answer))
        return answers

    def _draft(
        self, peer: DraftPeer, held: HeldSequence, request: ProposalRequest, proposal: Proposal
    ) -> SequenceProposals | None:
        """The answer to an update; None: it is not there yet, and nothing is to be said meanwhile."""
        if proposal.progress is Progress.DRAFTING:
            return None
        if proposal.progress is Progress.DONE:
            del self._pending[held.key]
            if request.max_alternatives and request.num_wanted > 0:
                self._ahead[held.key] = held
        tree = replace(
            proposal.tree.cut(_num_known_to(peer.hello, proposal.tree.token_ids)),
            prefix_hash=held.tokens.hash_at(proposal.tree.length),
        )
        return SequenceProposals(
            sequence_id=held.name[1],
            status=_status(proposal, tree),
            acked_length=len(held.tokens),
            branches=(tree,) if tree else (),
            num_computed=proposal.num_computed,
        )

    def _branches(self, peer: DraftPeer, held: HeldSequence, proposal: Proposal) -> SequenceProposals | None:
        """What a look-ahead has found; None: nothing yet."""
        trees = [tree for branch in proposal.ahead if (tree := _tree_of(branch, held, peer.hello))]
        trees = trees[: held.num_branches_left]
        held.num_branches_left -= len(trees)
        if not proposal.may_go_on or held.num_branches_left <= 0:
            del self._ahead[held.key]
        if not trees:
            return None
        return SequenceProposals(
            sequence_id=held.name[1], status=DraftStatus.AHEAD, acked_length=len(held.tokens), branches=tuple(trees)
        )

    def _push(self, answers: Answers) -> None:
        by_peer: dict[int, tuple[DraftPeer, list[SequenceProposals]]] = {}
        for peer, answer in answers:
            by_peer.setdefault(peer.peer_id, (peer, []))[1].append(answer)
        for peer, theirs in by_peer.values():
            peer.answer(theirs)

    def _finish(
        self,
        started: float,
        num_updates: int,
        num_refused: int,
        num_requests: int,
        answers: Answers,
        num_wasted_tokens: int,
    ) -> DraftStepStats:
        now = self._clock()
        num_tokens = dict.fromkeys((False, True), 0)  # by whether ahead
        for _, answer in answers:
            num_tokens[answer.status is DraftStatus.AHEAD] += sum(map(len, answer.branches))
        self._proposed.append((now, sum(num_tokens.values())))
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
            num_requests=num_requests,
            num_proposed_tokens=num_tokens[False],
            num_ahead_tokens=num_tokens[True],
            num_wasted_tokens=num_wasted_tokens,
        )

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify_all()


def _status(proposal: Proposal, tree: DraftTree) -> DraftStatus:
    if proposal.progress is Progress.CATCHING_UP:
        return DraftStatus.CATCHING_UP
    return DraftStatus.PROPOSED if tree else DraftStatus.NOTHING


def _tree_of(branch: AheadBranch, held: HeldSequence, hello: DraftHello) -> DraftTree:
    """Empty where the decode node's model does not have the ids."""
    assumed = branch.assumed_token_ids
    num_known = _num_known_to(hello, branch.token_ids) if _num_known_to(hello, assumed) == len(assumed) else 0
    tree = DraftTree(
        length=len(held.tokens) + len(assumed),
        prefix_hash=held.tokens.hash_after(assumed),
        token_ids=branch.token_ids,
        probability=branch.probability,
        distributions=branch.distributions,
        parents=branch.parents,
    )
    return tree.cut(num_known)


def _num_known_to(hello: DraftHello, token_ids: Sequence[int]) -> int:
    """Tokens before the first id that the decode node's model does not have: padded sizes may differ."""
    return next((index for index, token_id in enumerate(token_ids) if token_id >= hello.vocab_size), len(token_ids))
