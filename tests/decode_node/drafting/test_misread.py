"""The warning about a head whose drafts are almost never accepted."""

from __future__ import annotations

import pytest
import structlog

from decode_node.drafting.gather import DraftGatherer
from outrider.speculation.draft_controller import DraftController
from outrider.speculation.draft_source import NUM_CHECKED_DRAFTS
from outrider.speculation.draft_tree import DRAFT_NODE, DraftTree


def warnings_about(source, accepted):
    gatherer, draft = DraftGatherer(client=None, controller=DraftController(1)), DraftTree(0, None, (5,), source)
    with structlog.testing.capture_logs() as log:
        for each in accepted:
            gatherer.observe_verdict(1, draft, range(each))
    return log


@pytest.mark.parametrize("source", ["eagle3:tiny-head", DRAFT_NODE])
@pytest.mark.parametrize(
    ("num_accepted", "num_drafts", "num_warnings"),
    [
        (0, NUM_CHECKED_DRAFTS, 1),
        (3, NUM_CHECKED_DRAFTS, 1),
        (4, NUM_CHECKED_DRAFTS, 0),
        (0, NUM_CHECKED_DRAFTS - 1, 0),
        (0, 3 * NUM_CHECKED_DRAFTS, 1),
    ],
)
def test_it_is_judged_once_by_its_first_drafts(source, num_accepted, num_drafts, num_warnings):
    log = warnings_about(source, [True] * num_accepted + [False] * (num_drafts - num_accepted))
    assert [(each["log_level"], each["proposer"]) for each in log] == [("warning", source)] * num_warnings
    assert all(word in each["event"] for each in log for word in ("layer ids", "norms", "another target"))


def test_what_happens_later_is_the_texts_doing():
    assert warnings_about("eagle3:tiny-head", [True] * NUM_CHECKED_DRAFTS + [False] * 5 * NUM_CHECKED_DRAFTS) == []


def test_a_lookup_may_find_nothing():
    assert warnings_about("ngram", [False] * 2 * NUM_CHECKED_DRAFTS) == []
