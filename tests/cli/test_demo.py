from __future__ import annotations

import re

from outrider.bench.load import RequestRecord
from outrider.cli.demo import DEMO_PROMPTS, first_difference, summary_line
from outrider.client import RequestMetrics, SpeculationMetrics, Usage

LAST_LINE = re.compile(
    r"demo: identical=(yes|no) requests=7 mean_acceptance_length=\d+\.\d\d speedup=\d+\.\d\d "
    r"failover_gap_seconds=\d+\.\d\d"
)


def answer(*, has_speculation: bool, seconds: float) -> RequestRecord:
    """Returns an answer of eleven tokens in five deltas at equal intervals."""
    speculation = SpeculationMetrics(num_spec_steps=4 * has_speculation, num_accepted_draft_tokens=6 * has_speculation)
    return RequestRecord(
        prompt_id="chat",
        kind="chat",
        sent_at=0.0,
        finished_at=0.1 + seconds,
        token_times=tuple((0.1 + seconds * index / 4, 2 + (index == 4)) for index in range(5)),
        token_ids=tuple(range(11)),
        usage=Usage(num_prompt_tokens=240),
        metrics=RequestMetrics(speculation=speculation),
    )


def test_the_last_line_has_exactly_its_form():
    pairs = [(answer(has_speculation=True, seconds=1.0), answer(has_speculation=False, seconds=1.5))] * 3
    survivor = answer(has_speculation=True, seconds=9.0)
    line = summary_line(pairs, survivor, is_identical=True)
    assert line == ("demo: identical=yes requests=7 mean_acceptance_length=2.50 speedup=1.50 failover_gap_seconds=2.25")
    assert LAST_LINE.fullmatch(line)
    assert LAST_LINE.fullmatch(
        summary_line([(answer(has_speculation=False, seconds=0.0),) * 2] * 3, survivor, is_identical=False)
    )


def test_where_answers_part_is_found():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_there_are_three_different_prompts_of_about_the_same_length():
    assert [prompt.name for prompt in DEMO_PROMPTS] == ["chat", "extraction", "code"]
    assert all(800 < len(prompt.text) < 1300 for prompt in DEMO_PROMPTS)
