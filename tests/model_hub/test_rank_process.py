"""How a rank other than 0 ends before it computes, if rank 0 does not continue."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.engine.ranks.channel import Channel
from outrider.engine.ranks.commands import Stop
from outrider.errors import ModelError
from outrider.model_hub import rank_process
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.shard import Start

PATIENCE_SECONDS = 30.0
START = Start(
    config=ModelConfig(tensor_parallel_size=2),
    rank=1,
    store=Path("store"),
    block_size=16,
    max_rows_per_step=1,
    timeout_seconds=PATIENCE_SECONDS,
)


@pytest.mark.parametrize("told", [(), (START,)])
def test_a_rank_that_is_told_to_stop_while_the_node_starts_just_ends(monkeypatch, told):
    """This happens, for example, if a node finds that its cache is too large, and reports that."""
    monkeypatch.setattr(rank_process, "open_shard", lambda _: SimpleNamespace(room=7))
    (commands, far), (kv, far_kv), (tasks, far_tasks) = (socket.socketpair() for _ in range(3))
    rank_0 = Channel(far, peer="rank 1", timeout_seconds=PATIENCE_SECONDS)
    for message in (*told, Stop()):
        rank_0.send(message)
    with commands, kv, far_kv, tasks, far_tasks:
        rank_process._work(commands, kv, tasks)
        answers = [rank_0.receive(begins_within_seconds=PATIENCE_SECONDS) for _ in range(2 * len(told))]
    rank_0.close()
    assert answers == [None, 7][: 2 * len(told)]


def test_a_model_that_a_rank_cannot_load_is_one_line(monkeypatch, capsys):
    """Rank 0 reports the same error, unless only this rank has encountered it."""

    def refuse(*_):
        raise ModelError("a weight file is damaged")

    monkeypatch.setattr(rank_process, "_work", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ends = [end.detach() for end in socket.socketpair()]
    assert rank_process.main([str(end) for end in ends]) == 1
    assert capsys.readouterr().err == "a rank cannot start: a weight file is damaged\n"
