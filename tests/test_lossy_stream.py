"""A stream that neither fails nor waits, and says what it has lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from outrider.lossy_stream import MAX_PENDING_CHARACTERS, LossyStream

WAIT_SECONDS = 30.0


class Disk:
    """A file that a stream writes to. It may be full, or hang."""

    def __init__(self) -> None:
        self.text = ""
        self.is_full = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, text: str) -> None:
        self.goes_on.wait(WAIT_SECONDS)
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.text += text


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.goes_on.set()


def test_lines_that_a_full_disk_loses_are_counted_and_told_once_when_there_is_room_again(disk):
    stream = LossyStream(disk.write)
    stream.write("before\n")
    stream.drain(WAIT_SECONDS)
    disk.is_full = True
    for line in ("one\n", "two\nthree\n"):
        stream.write(line)
    stream.drain(WAIT_SECONDS)
    disk.is_full = False
    for line in ("after\n", "and more\n"):
        stream.write(line)
        stream.drain(WAIT_SECONDS)
    assert sorted(disk.text.splitlines()) == ["3 lines were lost", "after", "and more", "before"]
    assert stream.num_lost_lines == 3


def test_whoever_writes_does_not_wait_for_a_disk_that_hangs_and_what_waits_has_a_bound(disk):
    stream = LossyStream(disk.write)
    disk.goes_on.clear()
    line = "x" * 1023 + "\n"
    num_kept = MAX_PENDING_CHARACTERS // len(line)
    for _ in range(num_kept + 7):
        stream.write(line)
    assert stream.num_lost_lines == 7
    disk.goes_on.set()
    stream.drain(WAIT_SECONDS)
    assert disk.text.count(line) == num_kept


def test_a_stream_of_somebody_else_may_raise_anything(disk):
    def write(text: str) -> None:
        if text == "bad\n":
            raise RuntimeError("the notebook is gone")
        disk.write(text)

    stream = LossyStream(write)
    stream.write("bad\n")
    stream.write("good\n")
    stream.drain(WAIT_SECONDS)
    assert disk.text.startswith("good\n")


PROGRAM = """
import logging, os, subprocess, sys, time, warnings
from outrider.lossy_stream import guard_standard_streams
guard_standard_streams()
{more}
for stream in (sys.stdout, sys.stderr):
    for number in range(300):
        print("\\udcff line", number, "x" * 1000, file=stream)  # more than a pipe holds, and text that is none
logging.warning("by the standard library")
warnings.warn("by a library")
os.write(3, b"came to its end\\n")
"""
FREE_NUMBERS = "assert min(os.pipe()) > 2 and os.stat(os.open(os.devnull, 1)).st_rdev == os.fstat(2).st_rdev"
FROM_C = (
    "import ctypes; libc = ctypes.CDLL(None)\nfor _ in range(3000): libc.dprintf(2, b'by a library in C, %0100d', 7)"
)


def run(*, more: str = "", seconds: float = WAIT_SECONDS, **streams) -> tuple[int, bytes]:
    """Returns the exit status, and what was written to descriptor 3."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", f"import os\nos.dup2({writer}, 3)\n" + PROGRAM.format(more=more)]
    process = subprocess.Popen(command, pass_fds=(writer,), **streams)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        return process.wait(seconds), told.read()


@pytest.mark.parametrize("streams", ["a full disk", "closed", "nobody reads", "a reader that is stopped"])
def test_a_process_comes_to_its_end_whatever_its_streams_are(streams):
    more = FROM_C
    if streams == "a full disk":
        given = os.open("/dev/full", os.O_WRONLY)
    elif streams == "closed":
        given, more = None, FREE_NUMBERS
    else:
        reader, given = os.pipe()
        if streams == "nobody reads":
            os.close(reader)
    if given is None:
        status, told = run(more=more, preexec_fn=lambda: (os.close(1), os.close(2)))
    else:
        status, told = run(more=more, stdout=given, stderr=given)
        os.close(given)
    assert (status, told) == (0, b"came to its end\n")
    if streams == "a reader that is stopped":
        os.set_blocking(reader, False)
        assert os.read(reader, 1 << 20)


def test_what_was_written_last_is_there_after_the_end():
    reader, writer = os.pipe()
    more = "from outrider.lossy_stream import exit_now\nprint('last words', file=sys.stderr)\nexit_now(5)"
    status, _ = run(more=more, stderr=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as log:
        assert (status, log.read()) == (5, b"last words\n")
