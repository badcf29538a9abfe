from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.training.plan import RunState


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"form": "eagle9"}, "eagle3, medusa, mlp"),
        ({"minutes": 0}, "--minutes 0"),
        ({"minutes": float("nan")}, "--minutes nan"),
        ({"prompts": "x"}, "--prompts and --from-traffic"),
        ({"draft_vocab_size": 0}, "--draft-vocab 0"),
        ({"form": "mlp", "init_from": "x"}, "--init-from"),
    ],
)
def test_wrong_arguments_are_named(plan_of, fields, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(**fields)


def test_a_run_goes_on_only_as_it_began(plan_of):
    plan = plan_of()
    state = RunState.open(plan)
    with state.phase("answers", plan):
        pass
    state.finish("answers", plan)
    again = RunState.open(plan_of(minutes=5))
    assert again.done == ["answers"]
    assert again.seconds == state.seconds
    with pytest.raises(ConfigError, match="--form eagle3, not mlp"):
        RunState.open(plan_of(form="mlp"))


def test_time_of_a_phase_counts_over_runs(plan_of):
    plan = plan_of()
    state = RunState.open(plan)
    with state.phase("answers", plan) as clock:
        clock._started -= 7.0
    with RunState.open(plan).phase("answers", plan) as clock:
        assert 7.0 <= clock.seconds < 60.0
