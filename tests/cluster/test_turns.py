"""Which processes of a cluster take turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster import plan
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch, child_command, plan_children

TURNS_FILE = Path("/run/turns")
PORTS = {"port": 0, "metrics_port": 0}


def settings_of(config, name, *overrides):
    """Returns the setting by process name, for each process whose command line has it."""
    launch = Launch(overrides=overrides, environ={})
    found = {}
    for spec in plan_children(config, launch):
        command = child_command(spec, config, launch, targets={}, ports=PORTS, turns_file=TURNS_FILE)
        key = f"{name}="  # the last occurrence wins; defaults come first
        found.update((spec.name, part.removeprefix(key)) for part in command if part.startswith(key))
    return found


def roles_in_turns(config, *overrides):
    return settings_of(config, "model.turns_file", *overrides)


@pytest.fixture
def on_processors(monkeypatch):
    return lambda number: monkeypatch.setattr(plan, "usable_cpus", lambda: list(range(number)))


def test_nodes_on_the_same_processors_take_turns_and_nobody_else_does(on_processors):
    on_processors(2)
    config = ClusterConfig(decode_nodes=2, draft="draft_model:x")
    assert roles_in_turns(config) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), str(TURNS_FILE))


def test_nodes_with_processors_of_their_own_take_none(on_processors):
    on_processors(16)
    assert roles_in_turns(ClusterConfig()) == {}


@pytest.mark.parametrize(("quota", "threads"), [(2, {"2"}), (16, {"8", "7"})])
def test_a_quota_bounds_the_threads_and_pins_none(on_processors, monkeypatch, quota, threads):
    on_processors(64)
    monkeypatch.setattr("outrider.engine.processor.cpu_quota", lambda: quota)
    assert set(settings_of(ClusterConfig(), "model.num_threads").values()) == threads
    assert set(settings_of(ClusterConfig(), "model.cpus").values()) == {""}


def test_the_users_own_file_wins(on_processors):
    on_processors(2)
    found = roles_in_turns(ClusterConfig(), "model.turns_file=/elsewhere")
    assert set(found.values()) == {"/elsewhere"}


@pytest.mark.parametrize(("num_processors", "look_ahead"), [(2, "off"), (16, "auto")])
def test_a_draft_model_looks_ahead_where_no_target_model_computes_beside_it(on_processors, num_processors, look_ahead):
    on_processors(num_processors)
    config = ClusterConfig(draft="draft_model:x")
    assert settings_of(config, "draft_node.look_ahead") == {"draft-0": look_ahead}
    assert settings_of(ClusterConfig(), "draft_node.look_ahead") == {}
