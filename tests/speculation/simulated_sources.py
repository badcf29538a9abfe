"""A simulated batch whose drafts come from several sources, each with its own acceptance and cost.

The decode node's gatherer decides which sources are asked. Proposers advance a simulated clock by their durations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from decode_node.drafting.gather import DraftGatherer
from outrider.drafting.book import StepDrafts
from outrider.drafting.exchange import NO_TABLES
from outrider.engine.scheduler import StepReservation
from outrider.request import RequestOptions, SamplingParams
from outrider.session import OpenSequenceGroup, SampleStart
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.draft_tree import DRAFT_NODE, ROOT, DraftTree
from outrider.speculation.proposers.base import Progress, Proposal, ProposerInfo, nothing
from tests.speculation.simulated_batch import CURVES, MAX_DRAFT_TOKENS, SimulatedBatch, cost_model
from tests.support.fake_drafts import NoDrafts

LOOKUP, HEAD = "ngram", "head"
RIGHT, WRONG, WRONG_SIBLING = 7, 8, 9  # token ids
PROMPT_TOKENS = 40
ROUTER_SECONDS = 0.0003
MAX_TOKENS = 1_000_000


@dataclass(frozen=True)
class State:
    """How well each source drafts in one state of a text."""

    lasts: float  # tokens, on average
    grades: dict[int, float]  # the fraction of positions at which the lookup has a draft, by grade
    lookup: dict[int, float]  # the lookup's acceptance, by grade
    head: float | tuple[float, ...]  # the head's acceptance; a tuple has one value per depth
    remote: float = 0.0
    sibling: float = 0.0  # fraction of the head's wrong first tokens that have the right one as a sibling


FREE = State(60, {2: 0.2, 3: 0.1, 4: 0.05}, {2: 0.1, 3: 0.3, 4: 0.7}, head=0.5)
COPY = State(25, {2: 0.05, 4: 0.1, 8: 0.8}, {2: 0.3, 4: 0.8, 8: 0.95}, head=0.35)
HOT = State(50, {2: 0.15, 3: 0.05}, {2: 0.05, 3: 0.1}, head=0.4, remote=0.6)
DEPTHS = State(60, {2: 0.2, 3: 0.1, 4: 0.05}, {2: 0.1, 3: 0.3, 4: 0.7}, head=(0.48, 0.44, 0.55, 0.5, 0.5))
POOR = State(50, {2: 0.15, 3: 0.05}, {2: 0.05, 3: 0.1}, head=0.1, remote=0.1)
EQUAL = State(60, {}, {}, head=0.6, remote=0.6)
DRAWN = State(60, {2: 0.05}, {2: 0.1}, head=0.3, sibling=0.4)
TEXTS = {
    "chat": (FREE,),
    "copied": (COPY,),
    "mixed": (FREE, COPY),
    "hot": (HOT,),
    "poor": (POOR,),
    "depths": (DEPTHS,),
    "equal": (EQUAL,),
    "drawn": (DRAWN,),
}


class SimulatedText:
    """What each source would propose at each position. It depends only on the position, as in coupled sampling."""

    def __init__(self, states, seed, length):
        chosen = random.Random(seed)
        state = chosen.choice(states)
        self.grades = []
        self.right = {LOOKUP: [], HEAD: [], DRAFT_NODE: []}
        self.siblings = []  # by position: whether the sibling of the head's first token is right; None without sibling
        for _ in range(length):
            if chosen.random() < 1.0 / state.lasts:
                state = chosen.choice(states)
            shares = {0: 1.0 - sum(state.grades.values()), **state.grades}
            grade = chosen.choices(list(shares), list(shares.values()))[0]
            self.grades.append(grade)
            for source, acceptance in (
                (LOOKUP, state.lookup.get(grade, 0.0)),
                (HEAD, state.head),
                (DRAFT_NODE, state.remote),
            ):
                by_depth = acceptance if isinstance(acceptance, tuple) else (acceptance,)
                drawn = chosen.random()
                self.right[source].append([drawn < each for each in by_depth])
            self.siblings.append(chosen.random() < state.sibling if state.sibling else None)

    def draft(self, source, position, length, num_wanted):
        """Returns the draft after `length` tokens of a sequence, at this position of the text."""
        grade = self.grades[position] if source == LOOKUP else 0
        following = self.right[source][position : position + num_wanted]
        right = [each[min(depth, len(each) - 1)] for depth, each in enumerate(following)]
        token_ids = () if source == LOOKUP and not grade else tuple(RIGHT if each else WRONG for each in right)
        sibling = self.siblings[position] if source == HEAD else None
        if sibling is None or not token_ids:
            return DraftTree(length, None, token_ids, grade=grade)
        token_ids += (RIGHT if sibling and token_ids[0] != RIGHT else WRONG_SIBLING,)
        return DraftTree(length, None, token_ids, parents=(*range(ROOT, len(token_ids) - 2), ROOT))


@dataclass
class SimulatedProposer:
    """Takes `forward_seconds` for each token of its longest draft, and time for each row and each unread token."""

    batch: SourcesBatch
    source: str
    forward_seconds: float = 0.0
    row_seconds: float = 2e-6
    read_seconds: float = 0.0
    max_read: int = 1 << 30  # maximum tokens of one sequence that a call reads
    num_wasted_tokens: int = 0
    num_calls: int = 0  # for drafts
    asked: dict[int, list[int]] = field(default_factory=dict)  # by sequence: tokens of each draft
    _num_read: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.info = ProposerInfo(name=self.source)

    def propose(self, requests):
        seconds = max((request.num_wanted for request in requests), default=0) * self.forward_seconds
        self.num_calls += seconds > 0.0
        proposals = []
        for request in requests:
            key, size, num_wanted = request.sequence_id, len(request.token_ids), request.num_wanted
            num_unread = size - self._num_read.get(key, 0)
            num_read = min(num_unread, self.max_read)
            seconds += num_wanted * self.row_seconds + num_read * self.read_seconds
            self._num_read[key] = size - num_unread + num_read
            if num_read < num_unread:
                proposals.append(nothing(request, Progress.CATCHING_UP, num_behind=num_unread - num_read))
                continue
            if num_wanted:
                self.asked.setdefault(key, []).append(num_wanted)
            text, position = self.batch.texts[key]
            tree = text.draft(self.source, position, size, num_wanted)
            proposals.append(Proposal(sequence_id=key, tree=tree))
        self.batch.now += self.batch.disturbed(seconds)
        return proposals

    def forget(self, sequence_id):
        self._num_read.pop(sequence_id, None)


@dataclass
class SimulatedDraftNode(NoDrafts):
    """A draft node whose drafts arrive in time, but for the first `num_late` of those that are wanted in a row. Each
    step's messages take `message_seconds` of the event loop's and of the target's time. The loop also takes
    `ROUTER_SECONDS` a step, and `idle_seconds` before each text.
    """

    batch: SourcesBatch
    message_seconds: float = 0.0
    num_late: int = 0
    idle_seconds: float = 0.0
    loop_seconds: float = 0.0
    num_asked: int = 0
    _wanted: dict[int, int] = field(default_factory=dict)
    _num_in_a_row: dict[int, int] = field(default_factory=dict)  # steps in which drafts were wanted

    def open(self, sequence_id, start, token_ids, *, num_wanted):
        self._wanted[sequence_id] = num_wanted
        self.loop_seconds += self.idle_seconds

    def commit(self, updates, _tables=NO_TABLES, *, min_reach=0.0, wakes=True):
        self._wanted.update({key: num_wanted for key, _, num_wanted in updates})

    def take(self, sequence_ids, *, wait_seconds):
        found = StepDrafts(requested={key for key in sequence_ids if self._wanted.get(key, 0) > 0})
        self._num_in_a_row = {key: self._num_in_a_row.get(key, 0) + 1 for key in found.requested}
        for key, number in self._num_in_a_row.items():
            if number > self.num_late:
                text, position = self.batch.texts[key]
                found.trees[key] = text.draft(DRAFT_NODE, position, 0, MAX_DRAFT_TOKENS)
        found.hits = set(found.trees)
        self.num_asked += len(found.requested)
        self.loop_seconds += ROUTER_SECONDS + self.message_seconds * bool(found.requested)
        self.batch.now += self.message_seconds * bool(found.requested)
        return found


class SourcesBatch(SimulatedBatch):
    """`kind` is one of `TEXTS`, or several joined by "+", between which sequences alternate."""

    def __init__(
        self,
        kind,
        curve,
        num_sequences,
        *,
        sources=(),
        has_draft_node=False,
        num_draft=5,
        draft_node=None,
        **options,
    ):
        """`sources`: names and `SimulatedProposer` options of local proposers. `num_draft`: maximum draft tokens.
        `draft_node`: fields of `SimulatedDraftNode`.
        """
        self.now = 0.0
        self.texts = {}  # by sequence: [text, position]
        self.verified = []  # for each step, a list of (sequence, source, number of tokens)
        self.proposers = {source: SimulatedProposer(self, source, **costs) for source, costs in sources}
        self.draft_node = SimulatedDraftNode(self, **draft_node or {})
        self.gatherer = DraftGatherer(
            client=self.draft_node if has_draft_node else None,
            controller=DraftController(num_draft, cost=cost_model(curve)),
            proposers=list(self.proposers.values()),
            clock=lambda: self.now,
            loop_clock=lambda: round(1e9 * self.draft_node.loop_seconds),
        )
        self._samples = {}
        super().__init__(kind, curve, num_sequences, **options)

    def _begin(self, position=0):
        key = next(self._ids)
        kinds = self.kind.split("+")
        text = SimulatedText(TEXTS[kinds[key % len(kinds)]], f"{self.kind}{key}", self.length + MAX_DRAFT_TOKENS)
        self.texts[key] = [text, position]
        prompt, start = (RIGHT,) * PROMPT_TOKENS, SampleStart(0)
        opened = OpenSequenceGroup(
            sequence_group_id=b"",
            transfer_id=b"",
            request_id="",
            prompt_token_ids=prompt,
            samples=(start,),
            options=RequestOptions(sampling=SamplingParams(seed=1, max_tokens=MAX_TOKENS)),
        )
        self.gatherer.open(key, opened, start)
        sequence = SimpleNamespace(key=key, token_ids=[*prompt, *[RIGHT] * position])
        self._samples[key] = SimpleNamespace(
            sequence=sequence, sampling=opened.options.sampling, max_draft_tokens=MAX_DRAFT_TOKENS, may_draft=True
        )

    def forbid_drafts(self, key):
        """Forbids drafts, as a request with max_draft_tokens 0 does."""
        self._samples[key].max_draft_tokens, self._samples[key].may_draft = 0, False

    @property
    def sequence_ids(self):
        return list(self.texts)

    def step(self):
        """Returns (committed tokens, seconds on an idle machine including drafting)."""
        samples, started = list(self._samples.values()), self.now
        drafts = self.gatherer.gather(samples)
        room = StepReservation(samples, max_draft_rows=4096, num_rows=len(samples))
        num_rows = self.gatherer.choose(drafts, room, samples, num_waiting=0)
        chosen = {key: drafts.ranked[key].tree.cut(num) for key, num in num_rows.items()}
        committed, num_tokens = [], 0
        for sample in samples:
            key, draft = sample.sequence.key, chosen.get(sample.sequence.key, DraftTree(0))
            accepted = draft.path_of((RIGHT,) * MAX_DRAFT_TOKENS)
            num_accepted = len(accepted)
            if draft:
                self.gatherer.observe_verdict(key, draft, accepted)
            committed.append((sample, (RIGHT,) * (1 + num_accepted)))
            sample.sequence.token_ids += committed[-1][1]
            self.texts[key][1] += 1 + num_accepted
            num_tokens += 1 + num_accepted
        ended = {key for key, (_, position) in self.texts.items() if position >= self.length}
        self.gatherer.announce([each for each in committed if each[0].sequence.key not in ended])
        for key in ended:
            del self.texts[key], self._samples[key]
            self.gatherer.close(key)
            self._begin()
        self.num_rows = len(samples) + sum(map(len, chosen.values()))
        seconds = CURVES[self.curve](self.num_rows)
        self.gatherer.observe_step(
            seconds=self.disturbed(seconds), num_rows=self.num_rows, num_sequences=len(samples), num_prompt_rows=0
        )
        self.verified.append([(key, draft.source, len(draft)) for key, draft in chosen.items()])
        self.now += seconds
        return num_tokens, self.now - started

    def rate(self, num_steps):
        """Returns tokens per second."""
        steps = [self.step() for _ in range(num_steps)]
        return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)
