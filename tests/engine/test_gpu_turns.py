"""Turns between processes that load models on one GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from outrider.engine import gpu_turns
from outrider.engine.gpu_turns import loading_turn
from outrider.progress import no_progress

HOLDER = """
import time
import torch
from types import SimpleNamespace
from outrider.engine.gpu_turns import loading_turn
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=device)
with loading_turn(["cuda:0"], print):
    print("holds", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of the locks. A GPU's UUID is its name here."""

    class Properties:
        def __init__(self, device):
            self.uuid = device

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    return tmp_path / "locks"


def test_one_process_loads_at_a_time_on_each_gpu():
    inside, most, reports = [], [], []

    def load(devices):
        with loading_turn(devices, lambda *stage: reports.append(stage)):
            inside.append(devices)
            most.append(max(sum(device in each for each in inside) for device in devices))
            threading.Event().wait(0.02)
            inside.remove(devices)

    wanted = [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"], ["cuda:1"]]  # deadlocks without a fixed order
    threads = [threading.Thread(target=load, args=(devices,)) for devices in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == [1] * 4
    assert set(reports) == {("gpu", 0, 0)}


def test_nothing_is_locked_for_a_cpu(folder):
    with loading_turn(["cpu"], no_progress):
        assert not folder.exists()


@pytest.fixture
def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_turn_of_a_process_that_dies_ends_with_it(holder, capsys):
    with loading_turn(["cuda:0"], lambda *_stage: holder.kill()):
        assert holder.wait(timeout=10) == -signal.SIGKILL
    assert capsys.readouterr().err == ""


def test_a_process_that_hangs_is_not_waited_for_for_ever(holder, monkeypatch, capsys):
    assert gpu_turns.TURN_SECONDS >= 600
    monkeypatch.setattr(gpu_turns, "TURN_SECONDS", 0.1)
    holder.send_signal(signal.SIGSTOP)
    with loading_turn(["cuda:0"], no_progress):
        pass
    assert "nodes on GPU cuda:0 may load at the same time: " in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_costs_the_turns_only(folder, capsys):
    folder.write_text("a file")
    with loading_turn(["cuda:0"], no_progress):
        pass
    assert "may load at the same time: " in capsys.readouterr().err


def test_locks_are_in_the_cache_directory_of_this_user(folder):
    with loading_turn(["cuda:1"], no_progress):
        assert [path.name for path in folder.iterdir()] == ["gpu-cuda:1"]
