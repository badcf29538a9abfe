"""Processes that fetch the default model at the same time into one cache, like containers that share a volume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.model_hub.default_model import DIRECTORY_NAME

SCRIPT = Path(__file__).parent / "fetching_process.py"
WAIT_SECONDS = 60.0


class Fetching:
    """A process that fetches the default model."""

    def __init__(self, cache: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(cache), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, *words: object) -> list:
        """Returns the first line that begins with these words."""
        for line in self.process.stdout:
            said = json.loads(line)
            if said[: len(words)] == list(words):
                return said
        raise AssertionError(f"ended without saying {words}: {self.process.stderr.read()}")

    def end(self) -> tuple[int, list, str]:
        """Returns the exit status, the remaining lines, and stderr."""
        output, errors = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, [json.loads(line) for line in output.splitlines()], errors


@pytest.fixture
def fetch(tmp_path):
    started = []

    def start(*arguments: str, cache: Path = tmp_path) -> Fetching:
        started.append(Fetching(cache, *arguments))
        return started[-1]

    yield start
    for fetching in started:
        fetching.process.kill()
        fetching.process.wait(WAIT_SECONDS)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if ".tmp-" in path.name]


def test_one_downloads_and_the_others_wait_and_see_how_far_it_is(fetch, tmp_path):
    first = fetch()
    first.until("begins", "download")
    others = [fetch(), fetch()]
    for other in others:
        _, early, _ = other.until("wait")
        while not (later := other.until("wait"))[1]:
            assert later[1] == early == 0
        assert (early <= later[1], later[2]) == (True, 0)
    (tmp_path / "go").touch()
    for fetching in (first, *others):
        status, said, _ = fetching.end()
        assert status == 0
        assert said[-1] == ["has", str(tmp_path / DIRECTORY_NAME)]
    assert [said for said in said if said[0] == "begins"] == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_one_that_downloads_dies_another_takes_over_and_nothing_of_it_is_left(fetch, tmp_path, number):
    first = fetch()
    first.until("begins", "download")
    (abandoned,) = leftovers(tmp_path)
    second = fetch()
    second.until("wait")
    first.process.send_signal(number)
    first.end()
    second.until("begins", "download")
    assert abandoned not in leftovers(tmp_path)
    (tmp_path / "go").touch()
    status, said, _ = second.end()
    assert (status, said[-1]) == (0, ["has", str(tmp_path / DIRECTORY_NAME)])
    assert leftovers(tmp_path) == []


def test_a_cache_that_this_user_may_not_write_is_named_with_the_fix(fetch, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    status, said, errors = fetch("--as-nobody", cache=cache).end()
    assert (status, said) == (1, [])
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    assert errors == (
        f"the model cache {cache} cannot be written by user {user} (Permission denied): let that user write there, "
        "or choose another directory with OUTRIDER_CACHE_DIR\n"
    )
