from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.training.plan import RunState, only_run


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"form": "eagle9"}, "one of eagle3, dspark$"),
        ({"minutes": 0}, "--minutes 0"),
        ({"minutes": float("nan")}, "--minutes nan"),
        ({"prompts": "x"}, "--prompts and --from-traffic"),
        ({"draft_vocab_size": 0}, "--draft-vocab 0"),
        ({"num_steps": 0}, "--steps 0"),
        ({"num_layers": 0}, "--layers 0"),
        ({"rank": 0}, "--rank 0"),
        ({"batch_tokens": 0}, "--batch-tokens 0"),
        ({"passes": -1}, "--passes -1"),
        ({"answer_tokens": -1}, "--answer-tokens -1"),
        ({"feature_gb": float("nan")}, "--feature-gb nan"),
        ({"learning_rate": float("nan")}, "--rate nan"),
        ({"form": "dspark", "init_from": "x"}, "--init-from"),
    ],
)
def test_wrong_arguments_are_named(plan_of, fields, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(**fields)


def test_a_run_goes_on_only_as_it_began(plan_of):
    plan = plan_of()
    with only_run(plan):
        state = RunState.open(plan)
    with state.phase("answers"):
        pass
    again = RunState.open(plan_of(minutes=5))
    assert again.done == ["answers"]
    assert again.seconds == state.seconds
    with pytest.raises(ConfigError, match="--form eagle3, not dspark"):
        RunState.open(plan_of(form="dspark"))
    with pytest.raises(ConfigError, match="--steps 3, not 2"):
        RunState.open(plan_of(num_steps=2))


def test_one_run_at_a_time_works_in_a_folder(plan_of):
    with only_run(plan_of()), pytest.raises(ConfigError, match="another train-head"), only_run(plan_of()):
        pass
    with only_run(plan_of()):
        pass


def test_time_of_a_phase_counts_over_runs(plan_of):
    plan = plan_of()
    with only_run(plan):
        state = RunState.open(plan)

    def interrupt():
        with state.phase("answers") as clock:
            clock.began -= 7.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    state = RunState.open(plan)
    assert state.done == []
    with state.phase("answers") as clock:
        assert 7.0 <= clock.seconds < 60.0
