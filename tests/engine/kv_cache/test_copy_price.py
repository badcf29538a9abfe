from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from outrider.engine.engine import PromptEngine
from outrider.engine.input_batch import SequenceRows
from outrider.engine.kv_cache.copy_price import NUM_TIMES, CopyPrice
from outrider.engine.step_clock import StepClock
from outrider.profile import Part

BLOCK, MAX_ROWS = 16, 64


def priced(*, save, load, compute):
    """Returns a price with these milliseconds per block."""
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=MAX_ROWS)
    price.add_copy(0, save / 1e3, is_load=False)
    price.add_copy(0, load / 1e3, is_load=True)
    price.add_step(compute / 1e3 * 10, num_rows=10 * BLOCK, num_prompt_rows=10 * BLOCK)
    return price


@pytest.mark.parametrize(
    ("save", "load", "compute", "load_pays", "save_pays"),
    [
        (1.0, 1.0, 2.5, True, True),
        (1.0, 2.0, 2.5, True, False),  # what is there already may be loaded, but nothing more is saved
        (3.0, 1.0, 2.5, True, False),
        (1.0, 3.0, 2.5, False, False),
    ],
)
def test_a_copy_pays_if_it_is_faster_than_computing(save, load, compute, load_pays, save_pays):
    price = priced(save=save, load=load, compute=compute)
    assert (price.load_pays, price.save_pays) == (load_pays, save_pays)
    assert str(price) == f"save {save:.3f} ms, load {load:.3f} ms, compute {compute:.3f} ms"


def test_nothing_pays_before_all_is_measured():
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=MAX_ROWS)
    assert not (price.load_pays)
    assert not (price.save_pays)
    price.add_step(1.0, num_rows=BLOCK, num_prompt_rows=MAX_ROWS)
    assert not (price.load_pays)
    assert not (price.save_pays)
    price.add_copy(0, 0.1, is_load=True)
    assert price.load_pays
    assert not price.save_pays


def test_blocks_of_all_groups_are_needed():
    price = CopyPrice(block_size=BLOCK, num_groups=2, max_rows=MAX_ROWS)
    price.add_step(1.0, num_rows=BLOCK, num_prompt_rows=MAX_ROWS)
    for group in range(2):
        assert not price.load_pays
        for is_load in (True, False):
            price.add_copy(group, 0.3, is_load=is_load)
    assert price.load_pays
    assert not price.save_pays  # 1.2 s against 1 s


def test_the_price_follows_the_last_times_and_ignores_single_slow_ones():
    price = priced(save=1.0, load=1.0, compute=10.0)
    price.add_copy(0, 1.0, is_load=True)
    price.add_copy(0, 0.001, is_load=True)
    assert price.load_pays
    for _ in range(NUM_TIMES // 2 + 1):
        price.add_copy(0, 1.0, is_load=True)
    assert not price.load_pays


def test_small_steps_say_nothing_about_prompts():
    price = priced(save=1.0, load=1.0, compute=1.5)
    for _ in range(NUM_TIMES):
        price.add_step(1.0, num_rows=MAX_ROWS, num_prompt_rows=MAX_ROWS // 2 - 1)
    assert not price.save_pays
    price.add_step(1.0, num_rows=MAX_ROWS, num_prompt_rows=MAX_ROWS // 2)
    assert price.save_pays


def test_nodes_of_small_steps_learn_from_them():
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=16)
    price.add_step(1.0, num_rows=16, num_prompt_rows=8)
    assert price.step_seconds == 1.0


def test_the_time_of_a_token_is_that_of_computing():
    """Between layers, a prefill node hands KV off and waits for processors, which says nothing about computing."""
    seconds, added = [0.0], []
    clock = StepClock(lambda: int(seconds[0] * 1e9))

    def pass_time(passed, part):
        seconds[0] += passed
        clock.mark(part)

    def forward(batch, *, on_layer_done):
        for layer in range(2):
            seconds[0] += 1.0
            on_layer_done(layer)
        seconds[0] += 0.5

    def layer_done(_layer):
        clock.mark(Part.FORWARD)
        pass_time(10.0, Part.HAND_OFF)
        pass_time(100.0, Part.CPU_TURN)

    price = SimpleNamespace(add_step=lambda spent, **rows: added.append((spent, rows)))
    pool = SimpleNamespace(block_size=BLOCK, host=SimpleNamespace(price=price))
    runner = SimpleNamespace(forward=forward, is_asynchronous=False)
    engine = PromptEngine(pool, None, None, runner, clock=clock)
    rows = [SequenceRows([1, 2, 3], 0, array("i", [0]), num_logits=1)]
    for _ in range(2):
        pass_time(1000.0, Part.IDLE)
        engine.forward((), rows, on_layer_done=layer_done)
    assert added == [(2.5, {"num_rows": 3, "num_prompt_rows": 3})] * 2
