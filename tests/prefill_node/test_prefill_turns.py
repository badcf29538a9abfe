"""A prefill loop that shares its processors: it gives way between layers, and its prompts are the same."""

from __future__ import annotations

import pytest

from outrider.engine.fakes import ScriptedTurns
from outrider.profile import Part

NUM_LAYERS = 2  # of the scripted cache
PROMPT = list(range(100, 120))  # three chunks


@pytest.mark.parametrize("is_over", [True, False])
def test_every_forward_is_in_turns_that_end_between_layers(make_rig, is_over):
    turns = ScriptedTurns(is_over=is_over)
    rig = make_rig(cpu_turns=turns)
    rig.before_layer = lambda layer: turns.calls.append(f"layer {layer}" if turns.is_held else "not its turn")
    rig.start()
    _, blocks = rig.prefill(PROMPT)
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT
    rig.wait_until_idle()
    give_way = ["give", "take"] if is_over else []
    # After the last layer the forward ends, and the turn with it.
    assert turns.calls == ["take", "layer 0", *give_way, "layer 1", "give"] * 3


def test_it_waits_for_as_long_as_it_takes(make_rig):
    turns = ScriptedTurns(num_refusals=3)
    rig = make_rig(cpu_turns=turns).start()
    _, blocks = rig.prefill(PROMPT)
    assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT


def test_time_without_the_processors_is_counted_as_that(make_rig):
    turns = ScriptedTurns(is_over=True)
    rig = make_rig(cpu_turns=turns)
    spent = []
    tell = rig.loop._emit
    rig.loop._emit = lambda ended, stats: (stats and spent.append(stats.nanoseconds), tell(ended, stats))
    rig.start()
    rig.prefill(PROMPT)
    rig.wait_until_idle()
    assert all(parts[Part.CPU_TURN] > 0 for parts in spent)
    assert len(spent) == 3
