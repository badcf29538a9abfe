"""The proposer on a tiny head, compared with the head computed from scratch."""

from __future__ import annotations

import pytest
import torch

from outrider.request import SamplingParams
from outrider.speculation.proposers.base import Progress, ProposalRequest, ProposerInfo
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward
from tests.speculation.asking import proposals_of, start_of
from tests.speculation.draft_trees import likeliest_path
from tests.support.pool_integrity import check_proposer
from tests.support.toy_head import VOCAB_SIZE, WIDTH, ToyFeatures, ToyHead, drafted

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19, 4, 8, 15, 16, 23, 42]
GREEDY = SamplingParams(seed=5, max_tokens=400, temperature=0.0)
HOT = SamplingParams(seed=5, max_tokens=400, temperature=0.9, top_k=50, presence_penalty=0.7, repetition_penalty=1.2)
NO_KV = {"num_layers": 0, "max_depth": 5}


def proposer_of(head: ToyHead, *, num_cached_tokens: int = 8192, **options) -> DraftModelProposer:
    forward = HeadForward.of(
        head,
        num_cached_tokens=num_cached_tokens,
        known_token_ids=torch.ones(VOCAB_SIZE, dtype=torch.bool),
        device="cpu",
    )
    return DraftModelProposer(forward, ProposerInfo(name="toy:tiny"), **options)


def request(token_ids, num_wanted: int, params=GREEDY, *, key=1, **fields) -> ProposalRequest:
    start = start_of(params, prompt_length=len(PROMPT))
    return ProposalRequest(key, token_ids, num_wanted, start, **{"features": ToyFeatures(token_ids), **fields})


def drafts_of(proposer: DraftModelProposer, *requests: ProposalRequest) -> list[list[int]]:
    return [list(likeliest_path(each.tree).token_ids) for each in proposals_of(proposer, *requests)]


def expected(head, token_ids, params, num_tokens, **fields) -> list[int]:
    return drafted(head, token_ids, params, num_tokens, prompt_length=len(PROMPT), **fields)


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("kind", [{}, {"has_own_vocabulary": True}, NO_KV], ids=["plain", "own ids", "no kv"])
def test_after_each_commit_a_draft_is_what_the_head_makes_of_true_features(kind, params):
    head = ToyHead(**kind)
    proposer, text = proposer_of(head), list(PROMPT)
    for num_agreeing in (0, 2, 5, 1, 3):
        (draft,) = drafts_of(proposer, request(text, 5, params))
        assert draft == expected(head, text, params, 5)
        assert drafts_of(proposer_of(head), request(text, 5, params)) == [draft], "as without a cache"
        text = [*text, *draft[:num_agreeing], 3]
    proposer.forget(1)
    assert proposer._forward.pool.num_free_blocks == proposer._forward.pool.num_blocks


def test_a_batch_drafts_for_each_what_it_does_alone():
    head = ToyHead()
    texts = [PROMPT, PROMPT[:2], [(7 * i) % 300 for i in range(70)], [*PROMPT, 9, 9, 9]]
    proposer = proposer_of(head)
    drafts_of(proposer, *(request(text, 4, key=key) for key, text in enumerate(texts[:2])))
    found = drafts_of(proposer, *(request(text, 4, key=key) for key, text in enumerate(texts)))
    assert found == [expected(head, text, GREEDY, 4) for text in texts]


@pytest.mark.parametrize("num_known", [None, 0, len(PROMPT) - 2])
def test_without_features_of_all_tokens_there_is_no_draft_and_with_them_there_is(num_known):
    proposer = proposer_of(ToyHead())
    features = None if num_known is None else ToyFeatures(PROMPT, num_known=num_known)
    assert drafts_of(proposer, request(PROMPT, 3, features=features)) == [[]]
    assert len(drafts_of(proposer, request(PROMPT, 3))[0]) == 3
    assert drafts_of(proposer, request([*PROMPT, 5], 3, features=features)) == [[]]
    assert drafts_of(proposer, request([*PROMPT, 5, 6], 3)) == [expected(ToyHead(), [*PROMPT, 5, 6], GREEDY, 3)]


def test_a_text_of_one_token_has_no_row_yet():
    proposer = proposer_of(ToyHead())
    assert drafts_of(proposer, request([5], 3)) == [[]]
    assert len(drafts_of(proposer, request([5, 6], 3))[0]) == 3


def test_it_drafts_no_further_than_the_head_can():
    head = ToyHead(max_depth=3)
    (draft,) = drafts_of(proposer_of(head), request(PROMPT, 6))
    assert draft == expected(head, PROMPT, GREEDY, 3)


def test_a_head_without_kv_computes_no_prefix():
    proposer = proposer_of(ToyHead(**NO_KV), max_catch_up_rows=1)
    (proposal,) = proposer.propose([request([(7 * i) % 300 for i in range(1000)], 1)])
    assert proposal.progress is Progress.DONE
    assert len(proposal.tree) == 1


def test_what_was_evicted_is_computed_again():
    head, text = ToyHead(max_model_len=512), [(7 * i) % 300 for i in range(400)]
    proposer = proposer_of(head, num_cached_tokens=1024)
    for key in (0, 1, 2, 3, 0, 1):
        asked = [key, *text] if key else [key, *text, 8, 9]
        assert drafts_of(proposer, request(asked, 3, key=key)) == [expected(head, asked, GREEDY, 3)]


def ahead_of(proposer, asked: ProposalRequest) -> dict[tuple[int, ...], list[int]]:
    """Looks ahead until nothing is left. Returns the longest draft for each assumption."""
    found = {}
    for _ in range(200):
        (proposal,) = proposer.propose([asked])
        check_proposer(proposer)
        for branch in proposal.ahead:
            draft = list(likeliest_path(branch.tree).token_ids)
            found[branch.assumed_token_ids] = max(found.get(branch.assumed_token_ids, []), draft, key=len)
        if not proposal.has_more:
            return found
    raise AssertionError("never done")


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_looking_ahead_feeds_own_states_and_true_features_replace_them(params):
    head = ToyHead()
    proposer, fields = proposer_of(head), {"max_alternatives": 6}
    (draft,) = drafts_of(proposer, request(PROMPT, 3, params, **fields))
    branches = ahead_of(proposer, request(PROMPT, 3, params, looks_ahead=True, **fields))
    own = expected(head, PROMPT, params, 7)
    assert draft == own[: len(draft)]
    assert len([assumed for assumed in branches if assumed and list(assumed) != own[: len(assumed)]]) > 3
    for assumed, branch in branches.items():
        assert branch == expected(head, [*PROMPT, *assumed], params, len(branch), num_true=len(PROMPT))

    text = [*PROMPT, *own[:4]]
    calls = count_forwards(proposer)
    assert drafts_of(proposer, request(text, 3, params, **fields)) == [own[4:7]], "answered by what was drafted ahead"
    assert calls == []
    branches = ahead_of(proposer, request(text, 3, params, looks_ahead=True, **fields))
    again = expected(head, text, params, 7)
    assert again[:3] != own[4:7], "features make a difference"
    main = proposer._trees[1].main
    assert main.token_ids == again
    assert drafts_of(proposer, request(text, 3, params)) == [again[:3]]


def count_forwards(proposer) -> list[int]:
    """Returns a list to which each further forward adds its number of rows."""
    calls, forward = [], proposer._forward

    class Counting:
        def __getattr__(self, name):
            return getattr(forward, name)

        def decide(self, rows, copies):
            calls.append(sum(len(row.token_ids) for row in rows))
            return forward.decide(rows, copies)

    proposer._forward = Counting()
    return calls


def test_without_look_ahead_a_commit_costs_its_rows_and_one_for_each_further_token():
    proposer, text = proposer_of(ToyHead()), list(PROMPT)
    (draft,) = drafts_of(proposer, request(text, 3))
    calls = count_forwards(proposer)
    drafts_of(proposer, request([*text, *draft[:2], 9], 3))
    assert calls == [3, 1, 1]


def test_a_sequence_that_its_cache_cannot_hold_gets_no_draft_and_the_others_do():
    proposer = proposer_of(ToyHead(), num_cached_tokens=64)
    texts = {1: PROMPT, 2: [(7 * i) % 300 for i in range(62)], 3: PROMPT[:9]}
    found = drafts_of(proposer, *(request(text, 3, key=key) for key, text in texts.items()))
    assert found == [expected(ToyHead(), PROMPT, GREEDY, 3), [], expected(ToyHead(), PROMPT[:9], GREEDY, 3)]


def test_a_path_holds_its_own_states_and_not_those_of_a_whole_forward():
    proposer = proposer_of(ToyHead())
    drafts_of(proposer, *(request([key, *PROMPT], 3, key=key) for key in range(4)))
    states = [each.state for tree in proposer._trees.values() for each in tree.main.decided]
    assert len(states) == 12
    assert {state.untyped_storage().nbytes() for state in states} == {4 * WIDTH}


def test_a_forward_that_fails_leaves_the_cache_as_good_as_it_was(monkeypatch):
    head, text = ToyHead(), [(7 * i) % 300 for i in range(70)]
    proposer, fields = proposer_of(head), {"max_alternatives": 4}
    drafts_of(proposer, request(text, 3, **fields))
    whole, ways = ToyHead.forward, []

    def failing(self, rows, attend):
        whole(self, rows, attend)
        ways.append(len(rows.token_ids))
        raise RuntimeError("out of memory")

    for asked in (request(text, 3, looks_ahead=True, **fields), request([*text, 1, 2], 3), request(PROMPT, 3, key=2)):
        with monkeypatch.context() as patch:
            patch.setattr(ToyHead, "forward", failing)
            with pytest.raises(RuntimeError, match="out of memory"):
                proposer.propose([asked])
        check_proposer(proposer)
    assert len(ways) == 3
    both = drafts_of(proposer, request([*text, 1, 2], 3), request(PROMPT, 3, key=2))
    assert both == [expected(head, [*text, 1, 2], GREEDY, 3), expected(head, PROMPT, GREEDY, 3)]
    for key in (1, 2):
        proposer.forget(key)
    assert proposer._forward.pool.num_free_blocks == proposer._forward.pool.num_blocks
