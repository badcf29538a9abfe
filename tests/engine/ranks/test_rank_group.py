"""How a group of ranks ends, and how it reports a process that has ended."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.engine.ranks.commands import CommandMark, KvRequest, MoveSlots, Stop
from outrider.engine.ranks.group import Member, RankGroup
from outrider.engine.ranks.worker import RankProgress

PATIENCE_SECONDS = 30.0


class Rig:
    """A group of two ranks. The second is a process that waits for the end of its input."""

    def __init__(self):
        self.lost = queue.SimpleQueue()
        self.released = []
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        (ours, self.far), (kv, self.far_kv), (tasks, self.far_tasks) = (socket.socketpair() for _ in range(3))
        commands, kv = (Channel(end, peer="rank 1", timeout_seconds=PATIENCE_SECONDS) for end in (ours, kv))
        self.commands = Channel(self.far, peer="rank 0", timeout_seconds=PATIENCE_SECONDS)
        self.group = RankGroup(
            answer_seconds=PATIENCE_SECONDS, on_lost=self.lost.put, release=lambda: self.released.append(True)
        )
        self.group.add(Member(1, self.process, commands, kv, tasks))

    def receive(self):
        return self.commands.receive(begins_within_seconds=PATIENCE_SECONDS)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.process.kill()
    rig.process.wait(PATIENCE_SECONDS)
    rig.process.stdin.close()


def test_a_rank_that_is_killed_while_the_node_serves_is_told_at_once(rig):
    with rig.group:
        rig.process.kill()
        loss = rig.lost.get(timeout=PATIENCE_SECONDS)
        assert str(loss) == f"rank 1 (process {rig.process.pid}) ended with status -9"
    assert rig.lost.empty()
    assert rig.released == [True]


def test_a_step_that_fails_because_a_rank_was_killed_says_so(rig):
    def fail():
        with rig.group.running(MoveSlots(())):
            rig.process.kill()
            raise RuntimeError("Connection closed by peer")  # as a collective does when it fails

    with pytest.raises(RankLostError, match=r"rank 1 .* ended with status -9") as caught:
        fail()
    assert str(caught.value.__cause__) == "Connection closed by peer"


def test_a_group_that_is_closed_tells_the_others_to_stop_and_reports_no_loss(rig):
    def obey():
        assert rig.receive() == Stop()
        rig.process.stdin.close()

    obeying = threading.Thread(target=obey)
    obeying.start()
    with rig.group:
        pass
    obeying.join(PATIENCE_SECONDS)
    assert rig.process.poll() is not None
    assert rig.lost.empty()
    rig.group.close()
    assert rig.released == [True]


def test_a_message_to_a_rank_whose_end_is_closed_is_its_loss(rig):
    rig.commands.close()
    rig.process.kill()
    with pytest.raises(RankLostError, match="status -9"), rig.group.running(MoveSlots(())):
        raise AssertionError("this rank must not begin what the others do not do")


def test_a_rank_that_leaves_a_request_for_kv_unanswered_is_lost(rig):
    """Requests and answers no longer match after that, so the node must not continue."""
    with rig.group:
        rig.far_kv.close()
        with pytest.raises(RankLostError, match="rank 1"):
            rig.group.ask(
                1, KvRequest(plane="k", layers=range(1), slots=np.zeros(1, int), heads=range(1), after=CommandMark(0))
            )
        assert "status -9" in str(rig.lost.get(timeout=PATIENCE_SECONDS))


def test_silence_ends_a_wait(rig):
    with pytest.raises(RankLostError, match="rank 0 sends nothing"):
        rig.commands.receive(begins_within_seconds=0.01)


def test_progress_is_ordered_by_commands_then_layers():
    progress = RankProgress()
    reached = []
    for advance in (lambda: progress.layer_done(0), lambda: progress.layer_done(1), progress.command_done):
        assert not progress.wait_for(CommandMark(1), 0)
        advance()
        reached.append([progress.wait_for(CommandMark(0, layers), 0) for layers in (1, 2, 3)])
    assert reached == [[True, False, False], [True, True, False], [True, True, True]]
    assert progress.wait_for(CommandMark(1), 0)
    assert not progress.wait_for(CommandMark(1, 1), 0)
