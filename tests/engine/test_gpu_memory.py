"""What a process has of a GPU, and turns between those that load models there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from outrider.engine import gpu_memory
from outrider.engine.gpu_memory import CONTEXT_BYTES, driver_bytes, loading_turn, used_bytes

HOLDER = """
import sys, time
from pathlib import Path
import torch
from types import SimpleNamespace
from outrider.engine.gpu_memory import loading_turn
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=device)
with loading_turn(["cuda:0"], while_waiting=lambda: None, folder=Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    class Properties:
        def __init__(self, device):
            self.uuid = device

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 3 << 20)


@pytest.mark.parametrize(
    ("told", "others"),
    [
        ("pynvml module not found, please install nvidia-ml-py", None),
        ("GPU:0\nno processes are running", None),
        ("GPU:0\nprocess          1 uses    99999.000 MB GPU memory", None),
        ("GPU:0\nprocess        PID uses        2.000 MB GPU memory", None),  # not this one: another namespace
        ("GPU:0\nprocess        PID uses      503.500 MB GPU memory\nprocess 1 uses 1.0 MB", 1001 << 19),
    ],
)
def test_nvml_tells_what_the_driver_takes_or_it_is_estimated(monkeypatch, told, others):
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda _device: told.replace("PID", str(os.getpid())))
    assert driver_bytes("cuda") == others
    assert used_bytes("cuda") == (3 << 20) + (others or CONTEXT_BYTES)


def test_an_nvml_that_fails_is_no_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda _device: 1 / 0)
    assert used_bytes("cuda") == (3 << 20) + CONTEXT_BYTES


def test_one_process_loads_at_a_time_on_each_gpu(tmp_path):
    inside, most, reports = [], [], []

    def load(devices):
        with loading_turn(devices, while_waiting=lambda: reports.append(devices), folder=tmp_path):
            inside.append(devices)
            most.append(max(sum(device in each for each in inside) for device in devices))
            threading.Event().wait(0.02)
            inside.remove(devices)

    wanted = [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"], ["cuda:1"]]  # the order would be a deadlock
    threads = [threading.Thread(target=load, args=(devices,)) for devices in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == [1] * 4
    assert reports


def test_nothing_is_locked_for_a_cpu(tmp_path):
    with loading_turn(["cpu"], while_waiting=lambda: None, folder=tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_turn_of_a_process_that_dies_ends_with_it(holder, tmp_path, capsys):
    with loading_turn(["cuda:0"], while_waiting=holder.kill, folder=tmp_path, seconds=30):
        assert holder.wait(timeout=10) == -signal.SIGKILL
    assert capsys.readouterr().err == ""


def test_a_process_that_hangs_is_not_waited_for_for_ever(holder, tmp_path, capsys):
    holder.send_signal(signal.SIGSTOP)
    with loading_turn(["cuda:0"], while_waiting=lambda: None, folder=tmp_path, seconds=0.1):
        pass
    assert "nodes on GPU cuda:0 may load at the same time: " in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_costs_the_turns_only(tmp_path, capsys):
    (tmp_path / "locks").write_text("a file")
    with loading_turn(["cuda:0"], while_waiting=lambda: None, folder=tmp_path):
        pass
    assert "may load at the same time: " in capsys.readouterr().err


def test_locks_are_in_the_cache_directory_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    with loading_turn(["cuda:1"], while_waiting=lambda: None):
        assert [path.name for path in (tmp_path / "locks").iterdir()] == ["gpu-cuda:1"]
    assert gpu_memory.TURN_SECONDS >= 600
