from __future__ import annotations

import pytest

from outrider.cli.main import main
from outrider.cli.profile import as_lines
from outrider.profile import Profile, ProfiledStep, StepKind


def step(kind=StepKind.DECODE, **milliseconds):
    nanoseconds = {part.replace("_", "."): round(each * 1e6) for part, each in milliseconds.items()}
    return ProfiledStep(kind=kind, num_rows=2, num_sequences=1, nanoseconds=nanoseconds, event_loop_nanoseconds=500_000)


def test_figures_are_medians_and_shares_of_busy_time_by_kind_of_step():
    steps = (
        step(idle=50, forward_rest=2, forward_linear=6),
        step(forward_rest=4, forward_linear=8),
        step(StepKind.VERIFY, sampling=1),
    )
    profile = Profile(node="node", steps=steps, seconds=0.5, kv_bytes_per_token=23040, feature_bytes_per_token=1152)
    assert list(as_lines(profile)) == [
        "node: 3 steps in 0.50 s",
        "a token: 23,040 bytes of K and V, 1,152 of features",
        "",
        "decode: 2 steps, median of 2 rows, 1 sequences",
        "  part                     median ms    share",
        "  forward.linear               7.000    70.0%",
        "  forward.rest                 3.000    30.0%",
        "  total                       10.000",
        "  beside: event loop           0.500",
        "  idle between these steps: 50 ms in all",
        "",
        "verify: 1 steps, median of 2 rows, 1 sequences",
        "  part                     median ms    share",
        "  sampling                     1.000   100.0%",
        "  total                        1.000",
        "  beside: event loop           0.500",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--node", "127.0.0.1:1"), "cannot be reached"),
        (("--role", "decode_node", "--steps", "0"), "num_steps is 0, must be 1 to 1000"),
        (("--role", "decode_node", "--traced-steps", "1"), "--traced-steps needs --output"),
        (("--role", "decode_node", "--output", "/nowhere/trace.json.gz"), "--output /nowhere/trace.json.gz"),
    ],
)
def test_what_cannot_be_profiled_is_one_clear_line(capsys, arguments, message):
    assert main(["profile", *arguments]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("outrider profile: ")
    assert message in shown
    assert shown.count("\n") == 1
