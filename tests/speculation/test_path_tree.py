"""The paths of one sequence, their KV forks and the choice of rows, without a model."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.request import RequestOptions, SamplingParams, VerificationMethod
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.draft_tree import DraftTree
from outrider.speculation.features import HeadRules
from outrider.speculation.path_choice import AheadRow, candidate_rows, round_robin
from outrider.speculation.path_tree import DraftedToken, DraftPath, Opening, PathTree
from tests.speculation.draft_trees import likeliest_path
from tests.support.pool_integrity import check_pool

PROMPT = (1, 2, 3, 4, 5)
STOP = 99


class Sequence:
    """A tree whose tokens the test decides. Each token's runners-up are the token plus 100 and plus 200."""

    def __init__(
        self,
        *,
        num_blocks=64,
        max_tokens=900,
        head: HeadRules | None = None,
        method=VerificationMethod.COUPLED,
    ) -> None:
        self.pool = BlockPool(num_blocks=num_blocks, block_size=4, hash_seed=b"")
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, temperature=1.0)
        options = RequestOptions(sampling=sampling, stop_token_ids=(STOP,), verification_method=method)
        start = SequenceStart(options=options, sample=0, prompt_length=len(PROMPT))
        self.tree = PathTree(SequenceKV(self.pool), PROMPT, start, max_model_len=1000, sampling=None, head=head)

    def draft(self, path: DraftPath, *token_ids: int) -> DraftPath:
        for token_id in token_ids:
            num_rows = len(self.tree.missing(path))
            path.kv.reserve(path.kv.num_tokens + num_rows)
            path.kv.advance(path.kv.num_tokens + num_rows)
            path.decided.append(DraftedToken((token_id, token_id + 100, token_id + 200), state=f"before {token_id}"))
        return path

    def open(self) -> DraftPath:
        return self.tree.open(self.tree.openings(10)[0])

    def check(self) -> None:
        check_pool(self.pool, [path.kv.block_ids for path in self.tree.paths])


@pytest.fixture
def sequence() -> Sequence:
    return Sequence()


def tokens(sequence) -> list[list[int]]:
    return [path.token_ids for path in sequence.tree.paths]


def test_an_alternative_assumes_a_runner_up_and_becomes_the_main_path_when_it_is_committed(sequence):
    sequence.draft(sequence.tree.main, 10, 11, 12)
    first = sequence.open()
    assert first.token_ids == [110]
    assert list(sequence.tree.missing(first)) == [110]
    sequence.draft(first, 31, 32)
    second = sequence.draft(sequence.open(), 41)
    assert second.token_ids == [10, 111, 41]
    sequence.check()
    sequence.tree.follow([*PROMPT, 110, 31])
    assert tokens(sequence) == [[32]]
    assert sequence.tree.main is first
    assert sequence.tree.num_wasted_tokens == 3 + 1
    sequence.check()


def test_alternatives_further_on_outlive_a_commit_that_has_not_come_to_them(sequence):
    sequence.draft(sequence.tree.main, 10, 11, 12)
    sequence.draft(sequence.open(), 31)
    further = sequence.draft(sequence.open(), 41)
    sequence.tree.follow([*PROMPT, 10])
    assert tokens(sequence) == [[11, 12], [111, 41]]
    assert (further.num_assumed, further.num_sent) == (1, 0)
    sequence.tree.follow([*PROMPT, 10, 111, 41])
    assert tokens(sequence) == [[]]
    assert list(sequence.tree.missing(further)) == [41]
    sequence.check()


@pytest.mark.parametrize("num_agreeing", [0, 1, 3])
def test_where_no_path_was_right_the_kv_of_the_common_beginning_stays(sequence, num_agreeing):
    drafted = (10, 11, 12, 13)
    sequence.draft(sequence.tree.main, *drafted)
    sequence.draft(sequence.open(), 31, 32)
    sequence.tree.follow([*PROMPT, *drafted[:num_agreeing], 77])
    assert tokens(sequence) == [[]]
    assert list(sequence.tree.missing(sequence.tree.main)) == [77]
    assert sequence.tree.num_wasted_tokens == 4 - num_agreeing + 2
    sequence.check()


def test_a_text_that_goes_on_past_every_path_is_computed_from_where_they_end(sequence):
    sequence.draft(sequence.tree.main, 10)
    sequence.tree.follow([*PROMPT, 10, 11, 12])
    assert list(sequence.tree.missing(sequence.tree.main)) == [10, 11, 12]
    sequence.check()


def test_another_text_is_noticed(sequence):
    assert sequence.tree.is_continued_by([*PROMPT, 6])
    assert not sequence.tree.is_continued_by(PROMPT[:-1])
    assert not sequence.tree.is_continued_by([9, *PROMPT[1:], 6])


def test_it_learns_from_what_was_committed(sequence):
    tree = sequence.tree
    text = list(PROMPT)
    before = tree.acceptance.mean, tree.runner_up_chances[0].mean
    for _ in range(20):
        sequence.draft(sequence.tree.main, 10)
        text.append(110)
        sequence.tree.follow(text)
    assert tree.acceptance.mean < 0.25 < before[0]
    assert tree.runner_up_chances[0].mean > 0.8 > before[1]


def rows(sequence, **changes) -> list[AheadRow]:
    values = {"owner": 0, "num_wanted": 2, "max_alternatives": 7, **changes}
    return candidate_rows(sequence.tree, **values)


def test_the_main_path_grows_to_a_whole_next_draft_and_alternatives_replace_what_is_verified_or_follows(sequence):
    sequence.draft(sequence.tree.main, 10, 11)
    drafted = set()
    while found := rows(sequence):
        path = found[-1].path
        path = sequence.tree.open(path) if isinstance(path, Opening) else path
        sequence.draft(path, 50)
        drafted.add(id(path))
        sequence.check()
    assert len(sequence.tree.main.token_ids) == 2 + 1 + 2
    alternatives = [(path.num_assumed, path.num_decided) for path in sequence.tree.alternatives]
    assert {num_assumed for num_assumed, _ in alternatives} == {1, 2, 3}
    assert max(num_decided for _, num_decided in alternatives) == 2


def test_no_more_alternatives_than_allowed_and_none_of_what_ends_the_text(sequence):
    sequence.draft(sequence.tree.main, 10, STOP)
    assert [isinstance(row.path, Opening) for row in rows(sequence)] == [True] * 4
    sequence.open()
    assert [isinstance(row.path, Opening) for row in rows(sequence, max_alternatives=1)] == [False]
    ending = Sequence(max_tokens=1)
    ending.draft(ending.tree.main, 10)
    assert rows(ending) == []


def test_a_likely_text_is_drafted_first_and_owners_take_turns():
    def row(owner, probability):
        return AheadRow(owner, probability, None, None)

    found = round_robin([row(0, 0.9), row(0, 0.8), row(0, 0.7), row(1, 0.1), row(2, 0.2)])
    assert [(each.owner, each.probability) for each in found] == [(0, 0.9), (2, 0.2), (1, 0.1), (0, 0.8), (0, 0.7)]


def test_runners_up_are_siblings_in_the_order_of_their_probability(sequence):
    main = sequence.draft(sequence.tree.main, 10, 11, 12)
    token_ids, parents = sequence.tree.with_siblings(main, 0, 3)
    tree = DraftTree(len(PROMPT), token_ids=token_ids, parents=parents)
    assert tree.is_well_formed
    assert likeliest_path(tree).token_ids == (10, 11, 12)
    assert sorted(token_ids) == [10, 11, 12, 110, 111, 112, 210, 211, 212]
    assert {(tree.depths()[index], token_ids[index] % 100 - 9) for index in range(9)} == {(1, 1), (2, 2), (3, 3)}
    assert token_ids[:2] == (10, 11)
    assert token_ids.index(110) < token_ids.index(210)
    assert token_ids.index(110) < token_ids.index(111)


def test_a_drafter_that_is_often_wrong_puts_siblings_before_longer_paths(sequence):
    text = list(PROMPT)
    for _ in range(20):
        (token_id,) = sequence.draft(sequence.tree.main, 10).token_ids
        text.append(token_id + 100)
        sequence.tree.follow(text)
    token_ids, parents = sequence.tree.with_siblings(sequence.draft(sequence.tree.main, 10, 11), 0, 2)
    assert token_ids[:2] == (110, 10) or token_ids[:2] == (10, 110)
    assert token_ids.index(110) < token_ids.index(11)
    assert parents[token_ids.index(111)] == token_ids.index(10)


@pytest.fixture
def head() -> Sequence:
    return Sequence(head=HeadRules())


def states(path) -> list[str]:
    return [each.state for each in path.decided]


def fed(sequence, path) -> tuple[int, list[int]]:
    """Returns the number of rows that a path keeps, and the tokens to feed."""
    return path.kv.num_tokens, list(sequence.tree.missing(path))


def test_what_a_head_had_drafted_is_spare_after_a_commit_and_rows_with_own_states_go(head):
    main = head.draft(head.tree.main, 10, 11, 12, 13)
    head.draft(head.open(), 31)
    assert head.tree.follow([*PROMPT, 10, 11]) == (10, 11)
    assert tokens(head) == [[]]
    assert head.tree.stale_path is main
    assert (main.token_ids, states(main)) == ([12, 13], ["before 12", "before 13"])
    assert fed(head, head.tree.main) == (len(PROMPT) - 1, [10, 11])
    assert head.tree.num_missing(head.tree.main) <= head.tree.max_path_rows
    assert head.tree.num_wasted_tokens == 1
    head.check()


def test_a_spare_serves_until_the_text_leaves_it(head):
    head.draft(head.tree.main, 10, 11, 12, 13)
    text = [*PROMPT, 10]
    head.tree.follow(text)
    text.append(11)
    head.tree.follow(text)
    assert head.tree.stale_path.token_ids == [12, 13]
    head.draft(head.tree.main, 12, 20)
    text += [12, 20]
    head.tree.follow(text)
    assert head.tree.stale_path is None
    assert fed(head, head.tree.main) == (len(PROMPT) + 1, [12, 20])
    head.check()


def test_the_rest_of_the_spare_follows_the_new_path_while_they_agree(head):
    """The draft for the next step must not get shorter because the head drafts again."""
    head.draft(head.tree.main, *range(10, 16))
    head.tree.follow([*PROMPT, 10, 11])
    main = head.tree.main
    for num_drafted in range(3):
        assert head.tree.best_path(allow_stale=True).token_ids == [12, 13, 14, 15]
        assert head.tree.best_path(allow_stale=False).token_ids == [12, 13][:num_drafted]
        head.draft(main, 12 + num_drafted)
    main.num_sent = 4
    head.tree.drop_wrong_stale_path()
    assert (head.tree.stale_path is None, main.num_sent) == (False, 4)
    head.draft(main, 20)
    assert head.tree.best_path(allow_stale=True) is main
    head.tree.drop_wrong_stale_path()
    assert (head.tree.stale_path, main.num_sent) == (None, 3), "what follows is to be sent anew"
    head.check()


def test_a_drawn_guess_gives_way_to_the_new_path_also_where_they_agree():
    """Whether a token is judged as part of the stale or of the new path must not depend on what the new path drew."""
    head = Sequence(head=HeadRules(), method=VerificationMethod.REJECTION)
    head.draft(head.tree.main, *range(10, 16))
    head.tree.follow([*PROMPT, 10, 11])
    main = head.tree.main
    assert head.tree.best_path(allow_stale=True).token_ids == [12, 13, 14, 15]
    main.num_sent = 4
    head.tree.drop_wrong_stale_path()
    assert main.num_sent == 4, "the new path has not begun"
    head.draft(main, 12)
    assert head.tree.best_path(allow_stale=True) is main
    head.tree.drop_wrong_stale_path()
    assert (head.tree.stale_path, main.num_sent) == (None, 0), "the same token is sent anew, as a draw of the new path"


def test_an_alternative_that_was_right_becomes_the_spare(head):
    head.draft(head.tree.main, 10, 11, 12)
    alternative = head.draft(head.open(), 31, 32)
    assert states(alternative) == ["before 10", "before 31", "before 32"], "a runner-up follows the winner's row"
    head.tree.follow([*PROMPT, 110, 31])
    assert head.tree.stale_path.token_ids == [32]
    assert fed(head, head.tree.main) == (len(PROMPT) - 1, [110, 31])
    head.check()
    head.tree.free()
    assert head.pool.num_free_blocks == 64


def test_a_head_learns_from_the_spare_that_was_sent(head):
    text = list(PROMPT)
    before = head.tree.acceptance.mean
    head.draft(head.tree.main, *range(10, 30))
    for token_id in range(10, 30):
        text.append(token_id)
        head.tree.follow(text)
    assert head.tree.acceptance.mean > before + 0.2


def test_a_head_is_looked_ahead_for_also_while_rows_with_features_are_due(head):
    head.draft(head.tree.main, 10, 11)
    head.tree.follow([*PROMPT, 10, 11, 12])
    assert head.tree.num_missing(head.tree.main) == 3
    assert [row.path for row in rows(head)] == [head.tree.main]
    head.tree.main.kv.free()
    head.tree.follow([*PROMPT, *range(10, 40)])
    assert rows(head) == [], "what lost its KV is left alone"


def test_a_path_goes_no_further_than_a_head_can(head):
    limited = Sequence(head=HeadRules(max_own_rows=1))
    limited.draft(limited.tree.main, 10)
    assert not limited.tree.is_complete(limited.tree.main)
    limited.draft(limited.tree.main, 11)
    assert limited.tree.is_complete(limited.tree.main)
    assert {opening.index for opening in limited.tree.openings(5)} == {0}
    at_once = Sequence(head=HeadRules(max_own_rows=0))
    at_once.draft(at_once.tree.main, 10)
    assert at_once.tree.is_complete(at_once.tree.main)
    assert not at_once.tree.openings(5)


def test_a_head_without_kv_is_fed_with_the_newest_token_alone():
    sequence = Sequence(head=HeadRules(keeps_kv=False))
    assert list(sequence.tree.missing(sequence.tree.main)) == [PROMPT[-1]]
    assert sequence.tree.num_behind == 1


def test_outcomes_are_those_of_what_is_verified(sequence):
    """A token of another drafter begins an alternative, and nothing is drafted for what cannot be accepted."""
    sequence.draft(sequence.tree.main, 10, 11, 12)
    sequence.open()
    for verified, expected in (((), 1), ((10,), 2), ((10, 55, 56), 2), ((10, 11, 12, 13, 14), 6)):
        sequence.tree.verified = verified
        found = rows(sequence)
        main = [row.max_tokens + 3 for row in found if row.path is sequence.tree.main]
        assert main == ([expected + 2] if expected + 2 > 3 else []), verified
        openings = [row.path for row in found if isinstance(row.path, Opening)]
        assert max(each.index for each in openings) == min(expected, 3) - 1
        others = [each.token_id for each in openings if each.token_id not in (110, 210, 111, 211, 112, 212)]
        assert others == ([55] if 55 in verified else [])
    sequence.tree.verified = (10, 55, 56)
    (opening,) = (row.path for row in rows(sequence) if isinstance(row.path, Opening) and row.path.token_id == 55)
    other = sequence.tree.open(opening)
    assert (other.token_ids, states(other)) == ([10, 55], ["before 10", "before 11"])
    assert 55 not in [row.path.token_id for row in rows(sequence) if isinstance(row.path, Opening)]
    sequence.tree.verified = (10, 111)
    assert [row.path.token_id for row in rows(sequence) if isinstance(row.path, Opening)].count(111) == 1
    sequence.check()


def test_a_token_that_is_verified_gets_the_place_of_an_alternative_that_cannot_come_any_more(sequence):
    sequence.draft(sequence.tree.main, *range(10, 20))
    for _ in range(6):
        sequence.tree.open(sequence.tree.openings(4)[0])
    sequence.tree.verified = (10, 55)
    found = [row.path for row in rows(sequence, num_wanted=3, max_alternatives=6)]
    assert 55 in [path.token_id for path in found if isinstance(path, Opening)]
