"""Asks a proposer repeatedly until all drafts are complete."""

from __future__ import annotations

from outrider.request import RequestOptions, SamplingParams
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, Proposal, ProposalRequest
from outrider.speculation.proposers.draft_model import DraftModelProposer
from tests.support.pool_integrity import check_proposer

PROMPT = [11, 40, 7, 93, 120, 5, 66, 31, 8, 250, 77, 19]


def start_of(params: SamplingParams, *, prompt_length=12, sample=0, takes_trees=False, **options):
    options = RequestOptions(sampling=params, **options)
    return SequenceStart(options=options, sample=sample, prompt_length=prompt_length, takes_trees=takes_trees)


def proposals_of(proposer: DraftModelProposer, *requests: ProposalRequest) -> list[Proposal]:
    """Returns the complete proposals in the order of requests. Checks the block pool after each call."""
    done: dict[int, Proposal] = {}
    for _ in range(200):
        asked = [each for each in requests if each.sequence_id not in done]
        if not asked:
            return [done[each.sequence_id] for each in requests]
        proposals = proposer.propose(asked)
        check_proposer(proposer)
        done |= {each.sequence_id: each for each in proposals if each.progress is Progress.DONE}
    raise AssertionError("never done")
