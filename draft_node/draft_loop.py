"""READ FIRST. The draft node's engine thread: receive newest states → catch up → propose → look ahead → push.

One thread runs `DraftLoop.step` repeatedly, for all decode nodes together. A step makes at most one forward pass and a
rollout, and takes a limited number of updates from each decode node, so a new state never waits longer than one
such step. Sequences that wait for a draft come first. The next drafts of the others are made ahead while their targets
verify, until the target is expected to be done.

The event loop (`DraftServicer`) only moves messages between the streams and the peers' mailboxes. No state here is
essential: the decode node sends a sequence again if its prefix is not known here, and continues without drafts if it
gets no answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from draft_node.draft_peer import DraftPeer, ReceivedUpdate
from draft_node.feature_fetches import FeatureFetches
from draft_node.held_sequences import HeldSequence, HeldSequences
from outrider.engine.feature_spec import plane_of
from outrider.kv_transfer.connectors import Connector
from outrider.node import NodeLoad
from outrider.service.telemetry.logging import get_logger
from outrider.service.telemetry.recent_sum import RecentSum
from outrider.speculation.draft_stream import (
    MAX_AHEAD_BRANCHES,
    MAX_BRANCH_TOKENS,
    DraftHello,
    DraftStatus,
    SequenceProposals,
    SequenceUpdate,
    StepNotice,
    max_offered_tokens,
)
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.proposers.base import MAX_SEQUENCES, Progress, Proposal, ProposalRequest, Proposer
from outrider.speculation.proposers.isolated import IsolatedProposer

IDLE_SECONDS = 0.5

TIME_SMOOTHING = 0.2
TIME_FADING = 0.95
"""Weight of a new look-ahead step in the mean duration of such steps; factor of that mean for every other step."""

_log = get_logger("draft_loop")

Answers = list[tuple[DraftPeer, SequenceProposals]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStepStats:
    """The statistics of one step, for metrics."""

    seconds: float
    num_held: int  # sequences
    num_waiting: int  # sequences without an answer yet
    num_requests: int
    num_proposed_tokens: int  # in answers
    num_ahead_tokens: int  # in look-ahead branches; a branch that has grown counts again
    num_wasted_tokens: int  # drafted by a model, and now known not to be committed


class DraftLoop:
    """The sole owner of the proposer and the held tokens.

    `connect`, `disconnect`, `submit`, `stop` and `load` may be called from any thread; `step` and `run` belong to one.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_alternatives: int = 0,
        max_sequences: int = MAX_SEQUENCES,
        connector: Connector | None = None,
        on_step: Callable[[DraftStepStats], None] = lambda _stats: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_alternatives`: maximum number of paths per sequence that look-ahead follows; 0 disables it.

        `connector`: reads the features that decode nodes offer; None: offers are ignored.
        """
        self._proposer = IsolatedProposer(proposer, on_failure=self._log_failure, clock=clock)
        self._max_alternatives = max_alternatives
        self._on_step = on_step
        self._clock = clock
        self._held = HeldSequences(
            max_sequences=max_sequences,
            features=proposer.info.features,
            on_forgotten=self._forget,
            on_evicted=self._refuse_pending,
        )
        self._fetches: FeatureFetches | None = None
        if connector is not None and proposer.info.features is not None:
            self._fetches = FeatureFetches(connector, plane_of(proposer.info.features), on_read=self._wake)
        self._refused: Answers = []  # refusals of this step's updates
        self._pending: dict[int, HeldSequence] = {}  # sequences whose last update is not answered yet, by key
        self._ahead: dict[int, HeldSequence] = {}  # answered sequences with look-ahead, by key
        self._ahead_seconds = 0.0  # running mean of the duration of steps that only look ahead
        self._changed = threading.Condition()
        self._peers: dict[int, DraftPeer] = {}
        self._gone: list[int] = []
        self._peer_ids = itertools.count()
        self._has_changes = False
        self._is_stopping = False
        self._proposed = RecentSum(clock)  # tokens
        self._num_running = 0
        self.num_steps = 0
        self.step_started_at: float | None = None
        self.last_step_seconds = 0.0

    # Any thread.

    def connect(self, hello: DraftHello, notify: Callable[[], None]) -> DraftPeer:
        """Adds a decode node's stream. `notify` is called when there are answers to take or there is room again."""
        with self._changed:
            peer = DraftPeer(next(self._peer_ids), hello, notify)
            self._peers[peer.peer_id] = peer
        return peer

    def disconnect(self, peer: DraftPeer) -> None:
        """Frees everything that is held for a stream that has ended."""
        with self._changed:
            if self._peers.pop(peer.peer_id, None) is not None:
                self._gone.append(peer.peer_id)
        self._wake()

    def submit(
        self, peer: DraftPeer, updates: Sequence[SequenceUpdate | StepNotice], *, step_seconds: float = 0.0
    ) -> None:
        """Queues newest states, and notices of what is verified after them.

        `step_seconds`: the duration of a step of their target; 0 if unknown.
        """
        peer.submit(updates, look_ahead_deadline=self._clock() + step_seconds)
        self._wake()

    def stop(self) -> None:
        """Makes `run` return after the current step."""
        self._is_stopping = True
        self._wake()

    def load(self) -> NodeLoad:
        return NodeLoad(num_running=self._num_running, tokens_per_second=self._proposed.per_second())

    # Only the draft loop's thread.

    @property
    def has_work(self) -> bool:
        """Whether there is work for a step."""
        return bool(self._has_changes or self._pending or self._ahead)

    def run(self) -> None:
        """Runs steps while there is work, until `stop`."""
        while True:
            with self._changed:
                while not (self.has_work or self._is_stopping):
                    self._changed.wait(IDLE_SECONDS)
                if self._is_stopping:
                    return
            self._on_step(self.step())

    def step(self) -> DraftStepStats:
        """Takes newest states and sends proposals. The next step continues unfinished drafts."""
        self.step_started_at = started = self._clock()
        updates = self._take_updates()
        if self._fetches is not None:  # before updates, which may continue what was read
            for held in self._fetches.take_read():
                self._ahead.pop(held.key, None)
                self._pending[held.key] = held  # is answered once more
        self._apply(updates)
        refused, self._refused = self._refused, []  # for unknown prefixes, lack of room, or invalid updates
        requests = self._requests(started)  # for unanswered updates, then for look-ahead
        if any(len(received.update.token_ids) > MAX_BRANCH_TOKENS for _, received in updates):
            self._flush(started)  # the forward of a new text takes long
        num_wasted = self._proposer.num_wasted_tokens
        proposals = self._proposer.propose(requests)  # bounded work: at most one forward pass and a rollout
        answers = self._answers(requests, proposals)
        self._push([*refused, *answers], self._clock())
        self._learn_time(requests, self._clock() - started)
        num_wasted = self._proposer.num_wasted_tokens - num_wasted
        return self._finish(started, len(requests), answers, num_wasted)

    def _learn_time(self, requests: Sequence[ProposalRequest], seconds: float) -> None:
        """Updates the mean duration of look-ahead steps. Other steps reduce it, so that look-ahead is tried again."""
        if requests and requests[0].looks_ahead:
            weight = TIME_SMOOTHING if self._ahead_seconds > 0.0 else 1.0
            self._ahead_seconds += weight * (seconds - self._ahead_seconds)
        else:
            self._ahead_seconds *= TIME_FADING

    def _take_updates(self) -> list[tuple[DraftPeer, ReceivedUpdate]]:
        """Takes a limited number of updates from each peer, so a peer that sends many delays only itself."""
        with self._changed:
            self._has_changes = False
            peers = list(self._peers.values())
            gone, self._gone = self._gone, []
        for peer_id in gone:
            self._held.close_peer(peer_id)
        updates = [(peer, update) for peer in peers for update in peer.take_updates()]
        if any(peer.has_updates for peer in peers):
            self._has_changes = True
        return updates

    def _apply(self, updates: Sequence[tuple[DraftPeer, ReceivedUpdate]]) -> None:
        for peer, (update, look_ahead_deadline) in updates:
            if isinstance(update, StepNotice):
                self._take_notice(peer, update, look_ahead_deadline)
                continue
            if update.closed:
                self._held.close(peer, update.sequence_id)
                peer.drop_answers(update.sequence_id)
                continue
            outcome = self._held.apply(peer, update)
            if isinstance(outcome, DraftStatus):
                self._refused.append((peer, SequenceProposals(update.sequence_id, outcome)))
            else:
                outcome.look_ahead_deadline = look_ahead_deadline
                outcome.num_branches_left = MAX_AHEAD_BRANCHES
                self._ahead.pop(outcome.key, None)
                if self._fetches is not None and update.feature_offer is not None:
                    self._fetches.take_offer(outcome, update.feature_offer)
                self._pending[outcome.key] = outcome

    def _take_notice(self, peer: DraftPeer, notice: StepNotice, look_ahead_deadline: float) -> None:
        """Looks ahead for the outcomes of the step that has begun, from now on until it should end."""
        held = self._held.find(peer, notice.sequence_id)
        if held is None or len(held.tokens) != notice.length:
            return
        held.verified, held.look_ahead_deadline = notice.token_ids, look_ahead_deadline
        if held.key not in self._pending and held.num_wanted > 0 and held.num_branches_left > 0:
            self._ahead[held.key] = held

    def _refuse_pending(self, held: HeldSequence) -> None:
        """Answers an unanswered update with NO_ROOM, as the decode node sends no further update before the answer."""
        if held.key in self._pending:
            self._refused.append((held.peer, SequenceProposals(held.sequence_id, DraftStatus.NO_ROOM)))

    def _forget(self, held: HeldSequence) -> None:
        self._pending.pop(held.key, None)
        self._ahead.pop(held.key, None)
        self._proposer.forget(held.key)
        if self._fetches is not None:
            self._fetches.forget(held)

    def _requests(self, now: float) -> list[ProposalRequest]:
        """Returns requests for unanswered updates, then for look-ahead that is expected to end in time."""
        self._ahead = {key: held for key, held in self._ahead.items() if self._may_look_ahead(held, now)}
        return [
            *(self._request(held, now, looks_ahead=False) for held in self._pending.values()),
            *(self._request(held, now, looks_ahead=True) for held in self._ahead.values()),
        ]

    def _request(self, held: HeldSequence, now: float, *, looks_ahead: bool) -> ProposalRequest:
        max_alternatives = self._max_alternatives if self._may_look_ahead(held, now) else 0
        return ProposalRequest(
            sequence_id=held.key,
            token_ids=held.tokens.token_ids,
            num_wanted=self._num_offered(held, looks_ahead=max_alternatives > 0),
            start=held.start,
            max_alternatives=max_alternatives,
            looks_ahead=looks_ahead,
            owner=held.peer.peer_id,
            features=held.features,
            min_reach=held.min_reach,
            verified=held.verified,
        )

    def _may_look_ahead(self, held: HeldSequence, now: float) -> bool:
        """Returns whether look-ahead that begins now is expected to end before the target's step does."""
        is_able = self._max_alternatives > 0 and self._proposer.info.can_look_ahead
        return is_able and held.num_wanted > 0 and now + self._ahead_seconds < held.look_ahead_deadline

    def _num_offered(self, held: HeldSequence, *, looks_ahead: bool) -> int:
        """Returns the number of tokens to offer, never past max_tokens. Look-ahead offers no more than wanted."""
        if held.num_wanted <= 0:
            return 0
        offered = wanted = min(held.num_wanted, MAX_BRANCH_TOKENS)
        if not looks_ahead:
            offered = min(wanted + self._proposer.info.num_extra_tokens, max_offered_tokens(wanted))
        num_left = held.start.prompt_length + held.start.options.sampling.max_tokens - len(held.tokens)
        return max(0, min(offered, num_left))

    def _log_failure(self, error: Exception, _key: int) -> None:
        _log.error(
            "proposer failed for a sequence", proposer=self._proposer.info.name, error=str(error), exc_info=error
        )

    def _answers(self, requests: Sequence[ProposalRequest], proposals: Sequence[Proposal]) -> Answers:
        answers: Answers = []
        for request, proposal in zip(requests, proposals, strict=True):
            if request.looks_ahead:
                held = self._ahead[proposal.sequence_id]
                answer = self._branches(held, proposal)
            else:
                held = self._pending[proposal.sequence_id]
                answer = self._draft(held, request, proposal)
            if answer is not None:
                answers.append((held.peer, answer))
        return answers

    def _draft(self, held: HeldSequence, request: ProposalRequest, proposal: Proposal) -> SequenceProposals | None:
        """Returns the answer to an update, or None while its draft is unfinished."""
        if proposal.progress is Progress.DRAFTING:
            return None
        status = DraftStatus.CATCHING_UP
        tree = _to_send(proposal.tree, held)
        if proposal.progress is Progress.DONE:
            if tree or not held.is_fetching:  # otherwise another answer follows, with the features
                status = DraftStatus.PROPOSED if tree else DraftStatus.NOTHING
            del self._pending[held.key]
            if request.max_alternatives and request.num_wanted > 0:
                self._ahead[held.key] = held
        branches = (tree,) if tree else ()
        return SequenceProposals(held.sequence_id, status, len(held.tokens), branches, held.num_features)

    def _branches(self, held: HeldSequence, proposal: Proposal) -> SequenceProposals | None:
        """Returns an answer with new look-ahead branches, or None if there are none."""
        found = (_to_send(branch.tree, held, *branch.assumed_token_ids) for branch in proposal.ahead)
        trees = tuple(filter(None, found))[: held.num_branches_left]
        held.num_branches_left -= len(trees)
        if not proposal.has_more or held.num_branches_left <= 0:
            del self._ahead[held.key]
        return SequenceProposals(held.sequence_id, DraftStatus.AHEAD, len(held.tokens), trees) if trees else None

    def _push(self, answers: Answers, now: float) -> None:
        by_peer: dict[DraftPeer, list[SequenceProposals]] = {}
        for peer, answer in answers:
            by_peer.setdefault(peer, []).append(answer)
        for peer, theirs in by_peer.items():
            peer.answer(theirs, now)
        looking_ahead = {held.peer.peer_id for held in self._ahead.values()}
        self._flush(now, looking_ahead)

    def _flush(self, now: float, looking_ahead: AbstractSet[int] = frozenset()) -> None:
        """Sends branches that were collected for long enough, and all branches of peers without a look-ahead."""
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.flush(now, at_once=peer.peer_id not in looking_ahead)

    def _finish(self, started: float, num_requests: int, answers: Answers, num_wasted_tokens: int) -> DraftStepStats:
        now = self._clock()
        num_tokens = dict.fromkeys((False, True), 0)  # by whether they are in look-ahead branches
        for _, answer in answers:
            num_tokens[answer.status is DraftStatus.AHEAD] += sum(map(len, answer.branches))
        self._proposed.add(sum(num_tokens.values()))
        self._num_running = len(self._held)
        self.num_steps += 1
        self.last_step_seconds = now - started
        self.step_started_at = None
        return DraftStepStats(
            seconds=now - started,
            num_held=self._num_running,
            num_waiting=len(self._pending),
            num_requests=num_requests,
            num_proposed_tokens=num_tokens[False],
            num_ahead_tokens=num_tokens[True],
            num_wasted_tokens=num_wasted_tokens,
        )

    def _wake(self) -> None:
        with self._changed:
            self._has_changes = True
            self._changed.notify_all()


def _to_send(tree: DraftTree, held: HeldSequence, *assumed_token_ids: int) -> DraftTree:
    """Returns the draft with its prefix's hash, cut before the first id that the target does not have.

    Such ids occur if vocabularies are padded. The draft is empty if an assumed token has such an id.
    """
    vocab_size = held.peer.hello.vocab_size
    num_known = 0
    if max(assumed_token_ids, default=0) < vocab_size:
        token_ids = tree.token_ids
        num_known = next((index for index, each in enumerate(token_ids) if each >= vocab_size), len(token_ids))
    return replace(tree.cut(num_known), prefix_hash=held.tokens.hash_after(assumed_token_ids))
