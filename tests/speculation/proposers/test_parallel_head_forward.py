"""The proposer on heads that draft all tokens in one forward, compared with the same head over dense attention."""

from __future__ import annotations

import pytest
import torch

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward
from tests.heads import golden_files
from tests.heads.golden_heads import block_logits, opened
from tests.speculation.draft_trees import likeliest_path
from tests.support.native_kernels import native_kernels
from tests.support.pool_integrity import check_proposer

VOCAB_SIZE, WIDTH = 96, 32
FEATURES = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(4))
GREEDY = SamplingParams(seed=5, max_tokens=400, temperature=0.0)


class OfText:
    """Features of a text: the same for equal positions and tokens."""

    def __init__(self, token_ids):
        self.values = FEATURES[: len(token_ids) - 1] + torch.tensor(token_ids[:-1])[:, None] / VOCAB_SIZE

    def __len__(self):
        return len(self.values)

    def read(self, start, end):
        return self.values[start:end]


@pytest.fixture(params=golden_files.PARALLEL)
def head(request, tmp_path):
    return opened(golden_files.unpack(request.param, tmp_path))


@pytest.fixture(params=["torch", "native"])
def proposer(request, head):
    kernels = native_kernels() if request.param == "native" else None
    forward = HeadForward.of(
        head,
        num_cached_tokens=256,
        known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool),
        device="cpu",
        kernels=kernels,
    )
    return DraftModelProposer(forward, ProposerInfo(name="toy:tiny"), max_catch_up_rows=7)


class Unknown(OfText):
    """Features whose last row is no number."""

    def __init__(self, token_ids):
        super().__init__(token_ids)
        self.values[-1] = float("nan")


def drafts_of(proposer, *texts, num_wanted=3, params=GREEDY, min_reach=0.0):
    start = SequenceStart(options=RequestOptions(sampling=params), sample=0, prompt_length=4)
    requests = [
        ProposalRequest(key, text, num_wanted, start, features=OfText(text), min_reach=min_reach)
        for key, text in enumerate(texts, start=1)
    ]
    done = {}
    while len(done) < len(texts):
        asked = [each for each in requests if each.sequence_id not in done]
        proposals = proposer.propose(asked)
        check_proposer(proposer)
        is_alone = len(texts) == 1
        assert not is_alone or proposals[0].progress is not Progress.DRAFTING, "one forward is enough"
        done |= {each.sequence_id: each.tree for each in proposals if each.progress is Progress.DONE}
    return [list(likeliest_path(done[each.sequence_id]).token_ids) for each in requests]


def expected(head, text, assumed=()):
    best = block_logits(head, torch.tensor(text), OfText(text).values, assumed=assumed).argmax(-1)
    return (best if head.target_ids is None else head.target_ids[best]).tolist()


def test_a_draft_is_what_the_head_makes_of_true_features_after_each_commit(head, proposer):
    text = [11, 40, 7, 93, 5, 66, 31, 8, 77, 19, 4, 8, 15, 16, 23, 42, 1]
    for num_agreeing in (0, 2, 3, 1, 3):
        assert drafts_of(proposer, text) == [expected(head, text)]
        text = [*text, *expected(head, text)[:num_agreeing], 3]
    proposer.forget(1)
    assert proposer._forward.pool.num_free_blocks == proposer._forward.pool.num_blocks


def test_a_batch_drafts_for_each_what_it_does_alone(head, proposer):
    texts = [
        [7 * i % VOCAB_SIZE for i in range(start, start + num)] for start, num in ((0, 2), (3, 30), (9, 15), (2, 16))
    ]
    drafts_of(proposer, texts[0], texts[1])
    assert drafts_of(proposer, *texts) == [expected(head, text) for text in texts]


def test_it_drafts_no_more_than_one_block(head, proposer):
    text = [5, 6, 7]
    assert drafts_of(proposer, text, num_wanted=9) == [expected(head, text)]
    assert drafts_of(proposer, text, num_wanted=2) == [expected(head, text)[:2]]


def test_it_looks_ahead_by_a_block_after_each_assumed_outcome(head, proposer):
    """Tokens that are assumed are fed with the head's own states, or as rows of the block."""
    assert proposer.info.can_look_ahead
    start = SequenceStart(options=RequestOptions(sampling=GREEDY), sample=0, prompt_length=4)
    num = head.spec.num_parallel
    for text in ([5, 6, 7], [11, 40, 7, 93, 5, 66, 31, 8, 77, 19, 4, 8, 15, 16, 23, 42, 1]):
        request = ProposalRequest(1, text, 2, start, features=OfText(text), max_alternatives=7)
        proposer.propose([request])
        branches, has_more = [], True
        while has_more:
            (proposal,) = proposer.propose([request._replace(looks_ahead=True)])
            check_proposer(proposer)
            branches += proposal.ahead
            has_more = proposal.has_more
        main = proposer._trees[1].main.token_ids
        alternatives = [each for each in branches if list(each[0]) != main[: len(each[0])]]
        assert len({each.assumed_token_ids for each in alternatives}) == 7
        assert {len(each.assumed_token_ids) for each in alternatives} == {1, 2, 3}
        for assumed, tree in alternatives:
            assert list(tree.token_ids)[:num] == expected(head, text, assumed)[: len(tree)]
            assert len(tree) >= min(num, 2)
        assert len(main) >= 2 * 2 + 1
        assert main[num : 2 * num] == expected(head, text, tuple(main[:num]))[: len(main) - num]
        assert drafts_of(proposer, [*text, *main[:2], 3]) == [expected(head, [*text, *main[:2], 3])]
        proposer.forget(1)


def test_it_ends_with_the_first_token_that_is_reached_too_rarely(head, proposer):
    text = [5, 6, 7]
    assert drafts_of(proposer, text, min_reach=1.0) == [expected(head, text)[:1]]


def test_a_later_token_of_a_chained_head_depends_on_those_that_were_drawn(proposer, head):
    """With other seeds, the first tokens differ, and so do the logits of the others."""
    hot = [SamplingParams(seed=seed, max_tokens=400, temperature=2.0) for seed in range(12)]
    seen, decide = [], type(proposer._forward)._decide

    def noting(self, logits, rows, **options):
        seen.append((options["chosen"], torch.tensor(logits)))
        return decide(self, logits, rows, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(proposer._forward), "_decide", noting)
        for params in hot:
            drafts_of(proposer, [5, 6, 7], params=params)
            proposer.forget(1)
    if not head.spec.is_chained:
        assert all(chosen is None and torch.equal(logits, seen[0][1]) for chosen, logits in seen)
        return
    by_first = {}
    for chosen, logits in seen:
        by_first.setdefault(int(chosen[0]), []).append(logits)
    assert len(by_first) > 1
    assert all(torch.equal(each[1], many[0][1]) for many in by_first.values() for each in many)
    assert len({tuple(many[0][1].tolist()) for many in by_first.values()}) == len(by_first)


def test_features_that_are_no_numbers_end_a_draft_and_nothing_else(proposer):
    start, text = SequenceStart(options=RequestOptions(sampling=GREEDY), sample=0, prompt_length=4), [5, 6, 7, 8, 9]
    requests = [
        ProposalRequest(1, text, 3, start, features=Unknown(text), min_reach=0.1),
        ProposalRequest(2, text, 3, start, features=OfText(text)),
    ]
    bad, good = proposer.propose(requests)
    assert bad.progress is Progress.DONE
    assert len(bad.tree) <= 1
    assert good.tree.token_ids == proposer.propose(requests[1:])[0].tree.token_ids
    assert len(good.tree) == 3
