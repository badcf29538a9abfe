"""A draft node and its decode nodes on one clock, without network, threads or a model.

The draft loop, its proposer, its KV and the decode node's book are the real ones. A forward of the drafter, a
step of the target and the delivery of a message take fixed times.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_node.draft_loop import DraftLoop
from draft_node.draft_peer import DraftPeer
from outrider.drafting.book import DraftBook
from outrider.drafting.drafted_sequence import is_well_formed
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.speculation.draft_stream import SequenceProposals, SequenceStart, SequenceUpdate
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.path_tree import DraftedToken
from outrider.speculation.proposers.base import ProposerInfo
from outrider.speculation.proposers.draft_forward import PathRows
from outrider.speculation.proposers.draft_model import DraftModelProposer
from tests.drafting.books import take_updates
from tests.speculation.draft_trees import child
from tests.support.draft_messages import hello_of, start_of
from tests.support.fake_clock import FakeClock
from tests.support.fake_engine import ScriptedModel
from tests.support.fake_kv_cache import ScriptedKVCache

VOCAB_SIZE = 64
BLOCK_SIZE = 4
ORDER = 8  # number of tokens on which a decision depends; a model that reads whole texts would be too slow
TICK_SECONDS = 0.0005


class ScriptedForward:
    """A `DraftForward` whose model reads its context back from the KV cache: lost or mixed-up KV gives wrong tokens."""

    head = None
    max_tokens = 1
    max_model_len = 4096
    vocab_size = VOCAB_SIZE

    def __init__(self, clock: FakeClock, *, forward_seconds: float = 0.002, num_blocks: int = 4096) -> None:
        self.model = ScriptedModel(vocab_size=VOCAB_SIZE, order=ORDER)
        self.pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_seed=b"")
        self.calls: list[tuple[float, int]] = []  # (start time, number of rows) of each forward
        self._cache = ScriptedKVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_layers=1, features=None)
        self._clock = clock
        self._forward_seconds = forward_seconds

    def is_ready(self, start: SequenceStart) -> bool:
        return True

    def start(self, start: SequenceStart, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)

    def commit(self, sampling: object, token_ids: Sequence[int]) -> None:
        assert isinstance(sampling, list)
        sampling += token_ids

    def decide(self, rows: Sequence[PathRows], block_copies: Sequence[tuple[int, int]]) -> list[DraftedToken]:
        self.calls.append((self._clock(), sum(len(row.token_ids) for row in rows)))
        self._cache.copy_blocks(block_copies)
        for row in rows:
            for position, token_id in enumerate(row.token_ids, start=row.start_position):
                slot = row.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                self._cache.write_token(0, slot, token_id=token_id, position=position)
        self._clock.advance(self._forward_seconds)
        return [DraftedToken(self._decided(row)) for row in rows]

    def _decided(self, row: PathRows) -> tuple[int, ...]:
        if not row.num_decisions:
            return ()
        context = self._cache.context(row.block_ids, row.start_position + len(row.token_ids))
        assert isinstance(row.sampling, list)
        assert context == [*row.sampling, *row.assumed_token_ids]
        return tuple(ranked(self.model, context)[: row.num_decisions])


def ranked(model: ScriptedModel, context: Sequence[int]) -> list[int]:
    """Returns all ids, the likeliest first."""
    return _ranked(model, tuple(context[-ORDER:]))


@functools.cache
def _ranked(model: ScriptedModel, context: tuple[int, ...]) -> list[int]:
    logits = model.logits(context)
    return sorted(range(len(logits)), key=lambda token_id: -logits[token_id])


@dataclass
class Text:
    """A text that a decode node generates, with the record of its drafts."""

    token_ids: list[int]
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    hits: list[bool] = field(default_factory=list)


class DecodeNode:
    """A decode node whose steps take a fixed time and verify up to `num_wanted` draft tokens of each sequence.

    `shares`: the share of decisions in which the target agrees with the drafter's first choice, the share in which it
    agrees with the second choice, and so on.
    """

    def __init__(
        self, pair: SimulatedPair, shares: Sequence[float], *, num_sequences: int, num_wanted: int, takes_trees: bool
    ) -> None:
        self.clock = FakeClock(pair.clock())
        self.book = DraftBook(clock=self.clock)
        self.sequences: dict[int, Text] = {}
        self._pair = pair
        self._shares = shares
        self._num_wanted = num_wanted
        self._next_step = pair.clock()
        self.draft_node = self.book.nodes.add()
        self.book.connected(self.draft_node)
        name = f"decode-{len(pair.nodes)}"
        self.peer = pair.loop.connect(hello_of(name=name, vocab_size=VOCAB_SIZE), lambda: None)
        self.to_draft: list[tuple[float, list[SequenceUpdate], float]] = []
        self.from_draft: list[tuple[float, list[SequenceProposals]]] = []
        start = start_of(3, max_tokens=2000, takes_trees=takes_trees)
        for key in range(num_sequences):
            prompt = [len(pair.nodes), key, 7]
            self.sequences[key] = Text(list(prompt))
            self.book.open(key, start, prompt, num_wanted=num_wanted)

    def tick(self, now: float, *, is_stepping: bool) -> None:
        self.clock.advance(max(0.0, now - self.clock()))
        due = [answers for at, answers in self.from_draft if at <= now]
        self.from_draft = [each for each in self.from_draft if each[0] > now]
        for answer in itertools.chain.from_iterable(due):
            is_sound = is_well_formed(answer, vocab_size=VOCAB_SIZE)
            self.book.take_answer(self.draft_node, answer, is_well_formed=is_sound)
        if is_stepping and now >= self._next_step:
            if self._next_step > 0.0:
                self._finish_step()
            self._begin_step()
            self._next_step = now + self._pair.step_seconds
        updates = take_updates(self.book, self.draft_node)
        if updates:
            self.to_draft.append((now + self._pair.delay_seconds, updates, self.book.nodes.step_seconds))

    def _begin_step(self) -> None:
        found = self.book.find(self.sequences, wait_seconds=0.0)
        self._drafts = {key: tree.cut(self._num_wanted) for key, tree in found.trees.items()}

    def _finish_step(self) -> None:
        self.book.observe_step(self._pair.step_seconds)
        for key, sequence in self.sequences.items():
            draft = self._drafts.get(key, DraftTree(0))
            committed: list[int] = []
            last: int | None = ROOT
            while last is not None:
                committed.append(self._decide([*sequence.token_ids, *committed]))
                last = child(draft, last, committed[-1])
            sequence.token_ids += committed
            sequence.num_steps += 1
            sequence.hits.append(bool(draft))
            sequence.num_drafted += len(draft)
            sequence.num_accepted += len(committed) - 1
            self.book.update(key, committed, num_wanted=self._num_wanted)

    def _decide(self, context: Sequence[int]) -> int:
        digest = hashlib.blake2b(repr(list(context)).encode(), digest_size=4).digest()
        drawn = int.from_bytes(digest, "little") / 2**32
        choices = ranked(self._pair.forward.model, context)
        for choice, share in zip(choices, self._shares, strict=False):
            if drawn < share:
                return choice
            drawn -= share
        return choices[-1]

    def close_all(self) -> None:
        for key in self.sequences:
            self.book.close(key)


class SimulatedPair:
    """One draft node, and the decode nodes that `add_node` adds."""

    def __init__(
        self,
        *,
        step_seconds: float = 0.030,
        delay_seconds: float = 0.005,
        max_alternatives: int = 31,
        num_blocks: int = 4096,
    ) -> None:
        self.clock = FakeClock()
        self.forward = ScriptedForward(self.clock, num_blocks=num_blocks)
        self.proposer = DraftModelProposer(self.forward, ProposerInfo(name="draft_model:scripted"), clock=self.clock)
        self.loop = DraftLoop(
            self.proposer,
            max_sequences=1000,
            max_alternatives=max_alternatives,
            clock=self.clock,
        )
        self.step_seconds = step_seconds
        self.delay_seconds = delay_seconds
        self.nodes: list[DecodeNode] = []
        self.now = 0.0
        self.num_ahead_tokens = 0

    def add_node(
        self, *shares: float, num_sequences: int = 1, num_wanted: int = 4, takes_trees: bool = False
    ) -> DecodeNode:
        node = DecodeNode(self, shares, num_sequences=num_sequences, num_wanted=num_wanted, takes_trees=takes_trees)
        self.nodes.append(node)
        return node

    def run(self, seconds: float, *, is_stepping: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_SECONDS
            for node in self.nodes:
                node.tick(self.now, is_stepping=is_stepping)
            self._run_draft_node()

    def _run_draft_node(self) -> None:
        """Runs the draft node until its clock has caught up."""
        while self.clock() < self.now:
            for node in self.nodes:
                due = [each for each in node.to_draft if each[0] <= self.clock()]
                node.to_draft = [each for each in node.to_draft if each[0] > self.clock()]
                for _, updates, step_seconds in due:
                    self.loop.submit(node.peer, updates, step_seconds=step_seconds)
            began = self.clock()
            self.num_ahead_tokens += self.loop.step().num_ahead_tokens
            for node in self.nodes:
                self._send_answers(node, node.peer)
            if self.clock() == began and not self.loop.has_work:
                self.clock.advance(self.now - began)

    def _send_answers(self, node: DecodeNode, peer: DraftPeer) -> None:
        answers = peer.take_answers()
        if answers:
            node.from_draft.append((self.clock() + self.delay_seconds, answers))
