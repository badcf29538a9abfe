"""Rejection sampling behind everything that chooses drafts: what is committed has the target's distribution.

The ratio test is exact only if no drawn token influences whether it is judged. Here, the decode node's own gatherer and
controller choose between a head and a lookup, and the length of a draft reveals what was drawn: a draft ends after a
token that made the head unsure, or at a stop token, as with a careless proposer. In the negative control, the length
influences the choice, and the check must notice it. Seeds are fixed, so a test that passes always passes.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from decode_node.drafting.gather import DraftGatherer
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.sampler import SampleRows
from outrider.engine.scheduler import StepReservation
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.session import SampleStart
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.path_tree import PathTree
from outrider.speculation.proposers.base import ProposerInfo
from outrider.speculation.proposers.draft_forward import DraftForward
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier
from tests.statistical.chi_square import PASS, chi_square_z, probabilities
from tests.statistical.samplers import sampler_of
from tests.support.native_kernels import native_kernels
from tests.support.verifying import verify_now

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 12
DUE, STOP = 0, 3  # indices in the base logits: the token that is due, and the stop token
PERIOD = 7
NUM_STREAMS = 64
PROMPT = tuple(4 + place % PERIOD for place in range(2 * PERIOD))
HEAD_SECONDS = 0.0001


def logits_at(base, position):
    """Returns the target's logits for a periodic text. At each position, a different token is due, i.e. likeliest."""
    values, due = base.astype(np.float32), 4 + position % PERIOD
    values[DUE], values[due] = values[due], values[DUE]
    return values


def place_of(token_id, position):
    """Returns the token's index in the base logits."""
    due = 4 + position % PERIOD
    return {DUE: due, due: DUE}.get(token_id, token_id)


class ToyHead(DraftForward):
    """A head that draws from logits near the target's. If `is_unsure`, it is unsure after a token that was not due."""

    head = None

    def __init__(self, logits, clock, *, is_unsure):
        self.logits, self.clock, self.is_unsure = logits, clock, is_unsure
        self.pool = BlockPool(num_blocks=4000, block_size=16, hash_seed=b"", enable_prefix_cache=False)
        self.sampler = sampler_of(logits, native_kernels())
        self.max_model_len, self.vocab_size = 1 << 20, VOCAB_SIZE

    def decide(self, rows, copies):
        self.clock.now += HEAD_SECONDS
        deciding = [row for row in rows if row.num_decisions]
        if not deciding:
            return self._decide(np.empty((0, VOCAB_SIZE), np.float32), rows)
        ends = [row.start_position + len(row.token_ids) for row in deciding]
        sure = [
            0.001 if self.is_unsure and row.assumed_token_ids and place_of(row.token_ids[-1], end - 1) != DUE else 1.0
            for row, end in zip(deciding, ends, strict=True)
        ]
        logits = np.stack([logits_at(self.logits, end) for end in ends])
        return self._decide(logits, rows, confidences=np.asarray(sure))


class EndsWhereUnsure(DraftModelProposer):
    """A proposer whose drafts always end when the head is unsure."""

    def propose(self, requests):
        return super().propose([each._replace(min_reach=0.3) for each in requests])


def competition_z(*, is_unsure, num_tokens=140, seed=21):
    """Returns the distance of the numbers of due, stop and other tokens from their distribution."""
    rng, clock = np.random.default_rng(0), SimpleNamespace(now=0.0)
    logits = rng.standard_normal(VOCAB_SIZE) * 0.3
    logits[DUE], logits[STOP] = 6.0, 4.2
    sampler = sampler_of(logits, native_kernels())
    verifier, method = RequestVerifier(sampler), VerificationMethod.REJECTION
    params = SamplingParams(seed=seed, max_tokens=1 << 20, temperature=1.0)
    options = RequestOptions(sampling=params, verification_method=method, stop_token_ids=(STOP,))
    proposer = EndsWhereUnsure if is_unsure else DraftModelProposer
    head = ToyHead(logits + rng.standard_normal(VOCAB_SIZE) * 0.3, clock, is_unsure=is_unsure)

    def now():
        return clock.now

    gatherer = DraftGatherer(
        client=None,
        controller=DraftController(num_speculative_tokens=5),
        proposers=[NgramProposer(), proposer(head, ProposerInfo(name="head:toy"), clock=now)],
        clock=now,
    )
    opened = SimpleNamespace(
        options=options, prompt_token_ids=PROMPT, traceparent="", known_token_ids=lambda _start: PROMPT
    )
    samples = []
    for key in range(NUM_STREAMS):
        gatherer.open(key, opened, SampleStart(key, ()))
        state = sampler.start(params, sample=key, prompt_token_ids=PROMPT, stop_token_ids=(STOP,))
        sequence = SimpleNamespace(key=key, token_ids=list(PROMPT))
        samples.append(SimpleNamespace(sequence=sequence, sampling=state, max_draft_tokens=100, may_draft=True))
    num_drafts = Counter()
    end = len(PROMPT) + num_tokens
    while live := [each for each in samples if len(each.sequence.token_ids) < end]:
        drafts = gatherer.gather(live)
        room = StepReservation(sequences=[each.sequence for each in live], max_draft_rows=400, num_rows=len(live))
        num_rows = gatherer.choose(drafts, room, live, num_waiting=0)
        chosen = {key: drafts.ranked[key].tree.cut(num) for key, num in num_rows.items()}
        num_drafts.update(draft.source for draft in chosen.values())
        rows = []
        for sample in live:
            draft = chosen.get(sample.sequence.key, DraftTree(0))
            known = SampleRows(sample.sampling, len(sample.sequence.token_ids), draft.token_ids)
            rows.append(DraftRows(known, draft.distributions, method))
        targets = [
            logits_at(logits, each.rows.position + place) for each in rows for place in range(each.rows.num_rows)
        ]
        outcomes = list(zip(live, verify_now(verifier, np.stack(targets), rows), strict=True))
        for sample, outcome in outcomes:
            if draft := chosen.get(sample.sequence.key):
                gatherer.observe_verdict(sample.sequence.key, draft, range(outcome.num_accepted))
            sample.sequence.token_ids.extend(outcome.token_ids)
            sampler.commit(sample.sampling, outcome.token_ids)
        seconds = 0.03 + 0.000005 * len(targets)
        clock.now += seconds
        gatherer.observe_step(seconds=seconds, num_rows=len(targets), num_sequences=len(live), num_prompt_rows=0)
        gatherer.announce([(sample, outcome.token_ids) for sample, outcome in outcomes])
    assert min(num_drafts["ngram"], num_drafts["head:toy"]) > 0.05 * num_drafts.total(), "they compete"
    texts = [each.sequence.token_ids[len(PROMPT) : end] for each in samples]
    kinds = {DUE: 0, STOP: 1}
    drawn = [kinds.get(place_of(each, len(PROMPT) + place), 2) for text in texts for place, each in enumerate(text)]
    probs = probabilities(logits)
    return chi_square_z(np.asarray(drawn), np.asarray([probs[DUE], probs[STOP], 1.0 - probs[DUE] - probs[STOP]]))


@pytest.fixture
def drafts_end_at_stop_tokens(monkeypatch):
    begin = PathTree.__init__

    def begin_with_stop_tokens(tree, *args, **options):
        begin(tree, *args, **options)
        tree._stop_token_ids = frozenset(tree.start.options.stop_token_ids)

    monkeypatch.setattr(PathTree, "__init__", begin_with_stop_tokens)


@pytest.mark.parametrize("is_unsure", [False, True], ids=["full drafts", "drafts end where the head is unsure"])
def test_a_head_that_competes_with_a_lookup_biases_nothing(is_unsure):
    assert competition_z(is_unsure=is_unsure) < PASS


@pytest.mark.usefixtures("drafts_end_at_stop_tokens")
def test_drafts_that_end_at_a_stop_token_bias_nothing():
    assert competition_z(is_unsure=False) < PASS


@pytest.mark.usefixtures("drafts_end_at_stop_tokens")
def test_sources_that_are_compared_by_what_was_drawn_are_noticed(monkeypatch):
    """Mistake: a draft that ends early at a drawn stop token counts as worse, so a lookup replaces it."""
    monkeypatch.setattr(DraftTree, "was_drawn", False)
    assert competition_z(is_unsure=False) > PASS
