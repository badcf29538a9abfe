"""Turns of processes: their queue, killed and stopped processes, and that only one process computes at a time."""

from __future__ import annotations

import multiprocessing
import os
import struct
import time

import pytest

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.cpu_turns import SharedTurns, open_turns
from outrider.errors import ConfigError
from tests.engine.turn_parties import LONG, PATIENCE_SECONDS, Party, look_twice

SHORT = 0.5  # length in seconds of a lease that must expire


@pytest.fixture(scope="module")
def library_file():
    choice = choose_kernels()
    if choice.library is None:
        pytest.skip(choice.reason)
    return choice.library


@pytest.fixture
def turns_file(tmp_path):
    return tmp_path / "turns"


@pytest.fixture
def join(library_file, turns_file):
    """join() starts a Party, by default with leases that do not expire. All parties are killed after the test."""
    parties = []

    def start(min_lease_seconds=LONG):
        parties.append(Party(library_file, turns_file, min_lease_seconds))
        return parties[-1]

    yield start
    for party in parties:
        party.kill()


def wait_in_line(party, holder):
    """Lets the party ask for the holder's turn, and returns once the party is in the queue."""
    assert not party.take()
    assert holder.is_over()
    party.ask("take", LONG)


def test_who_gives_a_turn_away_gets_the_next_one_after_those_who_wait(join):
    first, second = join(), join()
    assert first.take()
    wait_in_line(second, first)
    first.give()
    assert second.answer() is True
    assert not first.take()
    second.give()
    assert first.take()
    assert first.num_taken_from_others() == second.num_taken_from_others() == 0


def test_the_line_is_in_the_order_of_asking(join):
    holder, first, second, third = (join() for _ in range(4))
    assert holder.take()
    for party in (first, second, third):
        wait_in_line(party, holder)
    holder.give()
    for party, later in ((first, (second, third)), (second, (third,)), (third, ())):
        assert party.answer() is True
        assert not any(other.has_answered(within=0.05) for other in later)
        party.give()


def test_who_leaves_the_line_is_passed_over(join):
    holder, first, second = join(), join(), join()
    assert holder.take()
    assert not first.take()  # keeps a place in the queue
    assert not second.take()
    first.give()
    holder.give()
    assert second.take()
    assert second.num_taken_from_others() == 0


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_holder_that_is_killed_or_stopped_loses_its_turn(join, end):
    lost, waiting = join(SHORT), join()
    assert lost.take()
    getattr(lost, end)()
    assert waiting.take(LONG)
    assert waiting.num_taken_from_others() == 1
    for _ in range(10):  # the lost process delays nobody any more
        waiting.give()
        assert waiting.take()
    assert waiting.num_taken_from_others() == 1


def test_a_stopped_holder_that_goes_on_finds_its_turn_lost_and_takes_nobody_elses(join):
    lost, other, third = join(SHORT), join(), join()
    assert lost.take()
    lost.stop()
    assert other.take(LONG)
    lost.go_on()
    assert not lost.keep()
    lost.give()
    assert not third.take()
    other.give()
    assert third.take()
    assert third.num_taken_from_others() == 0


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_one_that_is_killed_or_stopped_in_line_is_waited_for_once(join, end):
    holder, lost = join(SHORT), join()
    assert holder.take()
    assert holder.keep(LONG)
    wait_in_line(lost, holder)
    getattr(lost, end)()
    holder.give()  # gives the lost process a short lease
    assert holder.take(LONG)
    assert not holder.is_over()
    holder.give()
    assert holder.take()
    assert holder.num_taken_from_others() == 1


def test_a_process_in_the_slot_of_a_killed_one_gives_back_what_that_held(join):
    lost, waiting = join(), join()
    assert lost.take()
    wait_in_line(waiting, lost)
    lost.kill()
    join()
    assert waiting.answer() is True
    assert waiting.num_taken_from_others() == 0


def test_a_lease_that_is_renewed_does_not_run_out(join):
    slow, waiting = join(SHORT), join()
    assert slow.take()
    assert slow.keep(LONG)  # the expected duration
    assert not waiting.take(2 * SHORT)
    slow.give()
    assert waiting.take(LONG)
    assert waiting.num_taken_from_others() == 0


def test_a_turn_is_over_after_its_time_if_somebody_waits(join):
    holder, waiting = join(), join()
    assert holder.take()
    assert not holder.is_over(0.0)  # no process waits
    assert not waiting.take()
    assert not holder.is_over(LONG)
    assert holder.is_over(0.0)


def test_giving_without_a_turn_changes_nothing(join):
    holder, other = join(), join()
    assert holder.take()
    other.give()
    other.give()
    assert not other.take()
    holder.give()
    holder.give()
    assert other.take()


@pytest.mark.parametrize("seconds_ahead", [20, 10**6])
def test_a_file_that_an_earlier_life_of_the_machine_left_holds_nobody_up(join, turns_file, seconds_ahead):
    """The clock before a reboot was ahead of the present one, so the lease in the file ends far in the future."""
    party, another_slot = join(), 200
    with turns_file.open("r+b") as file:
        file.write(struct.pack("=Q", 7 << 16 | another_slot + 1))
        file.seek(16 + 8 * another_slot)
        file.write(struct.pack("=q", time.monotonic_ns() + seconds_ahead * 10**9))
    assert party.take()
    assert party.num_taken_from_others() == 1


@pytest.mark.parametrize("in_turns", [True, False], ids=["in_turns", "negative_control"])
def test_one_at_a_time(library_file, turns_file, tmp_path, in_turns):
    """Three processes write their number and read it again. With turns, none ever reads another's number."""
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(4096))
    context = multiprocessing.get_context("spawn")
    results, start = context.Queue(), context.Barrier(3)
    chosen = library_file if in_turns else None
    processes = [
        context.Process(target=look_twice, args=(number, chosen, turns_file, shared, start, results))
        for number in (1, 2, 3)
    ]
    for process in processes:
        process.start()
    num_met = sum(results.get(timeout=PATIENCE_SECONDS) for _ in processes)
    for process in processes:
        process.join(PATIENCE_SECONDS)
    assert (num_met == 0) is in_turns


def test_a_file_that_cannot_be_had_is_an_error_of_the_settings(library_file, tmp_path):
    library = KernelLibrary(library_file)
    with pytest.raises(ConfigError, match=r"cannot open the turns file .*/missing/turns: "):
        SharedTurns(library, tmp_path / "missing" / "turns")
    other = tmp_path / "other"
    other.write_text("somebody's")
    with pytest.raises(ConfigError, match="it is not a turns file"):
        SharedTurns(library, other)
    assert other.read_text() == "somebody's"


def test_a_file_that_another_user_may_have_placed_is_refused(library_file, tmp_path, monkeypatch):
    library = KernelLibrary(library_file)
    elsewhere, link, writable = (tmp_path / name for name in ("elsewhere", "link", "writable"))
    link.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="symbolic link"):
        SharedTurns(library, link)
    assert not elsewhere.exists()
    writable.touch()
    writable.chmod(0o666)
    with pytest.raises(ConfigError, match="another user owns it or may write to it"):
        SharedTurns(library, writable)
    foreign = tmp_path / "foreign"
    foreign.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: foreign.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user owns it or may write to it"):
        SharedTurns(library, foreign)


def test_a_node_that_shares_no_processors_takes_no_turns(library_file, turns_file):
    def opened(path, *, num_threads=2, cpus=(0, 1), is_native=True):
        kernels = CpuKernels(KernelLibrary(library_file), num_threads)
        return open_turns(path, kernels if is_native else None, cpus=cpus)

    path = str(turns_file)
    nobody, torchs, few = opened(""), opened(path, is_native=False), opened(path, num_threads=1)
    assert nobody.description == "none"
    assert torchs.description == "none: turns need native kernels"
    assert few.description == "none: fewer threads than processors"
    for turns in (nobody, torchs, few):
        assert turns.take(0.0)
        assert turns.keep(0.0)
        assert not turns.is_over(0.0)
        turns.give()
    assert list(turns_file.parent.iterdir()) == []
    assert opened(path).description == f"{path}-0-1"
    assert opened(path, num_threads=4, cpus=(0, 1, 2, 5)).description == f"{path}-0-2,5"
