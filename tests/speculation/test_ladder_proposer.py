from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.errors import ConfigError
from outrider.speculation.proposers.base import Progress, ProposalRequest
from outrider.speculation.proposers.factory import make_ladder
from outrider.speculation.proposers.ladder import LadderProposer
from tests.support.scripted_proposer import ScriptedProposer


def drafts(proposer, *requests):
    return [proposal.tree.token_ids for proposal in proposer.propose(requests)]


def test_each_sequence_is_served_by_the_first_that_has_something():
    first, second = ScriptedProposer([[1, 2, 3]]), ScriptedProposer([[1, 2, 4], [7, 8]])
    ladder = LadderProposer([first, second])
    requests = (ProposalRequest(1, [1], 2), ProposalRequest(2, [7], 2), ProposalRequest(3, [9], 2))
    assert drafts(ladder, *requests) == [(2, 3), (8,), ()]
    assert [request.sequence_id for request in second.requests] == [2, 3]
    ladder.forget(2)
    assert first.forgotten == second.forgotten == [2]


def test_what_still_works_or_only_keeps_up_or_looks_ahead_is_not_passed_down():
    class Busy(ScriptedProposer):
        def propose(self, requests):
            return [replace(proposal, progress=Progress.CATCHING_UP) for proposal in super().propose(requests)]

    second = ScriptedProposer([[1, 2]])
    assert drafts(LadderProposer([Busy([]), second]), ProposalRequest(1, [1], 2)) == [()]
    kept_up, ahead = ProposalRequest(1, [1], 0), ProposalRequest(2, [1], 2, looks_ahead=True)
    assert drafts(LadderProposer([ScriptedProposer([]), second]), kept_up, ahead) == [(), ()]
    assert second.requests == []


def test_names_say_who_is_asked():
    assert make_ladder("suffix", "ngram").info.name == "suffix > ngram"
    assert make_ladder("suffix", "none").info.name == make_ladder("suffix", "suffix").info.name == "suffix"
    with pytest.raises(ConfigError):
        make_ladder("ngram", "psychic")


def test_its_memory_is_that_of_all_of_them():
    alone = [make_ladder(name, "none").info.memory_bytes for name in ("suffix", "ngram")]
    assert make_ladder("suffix", "ngram").info.memory_bytes == sum(alone) > max(alone)
