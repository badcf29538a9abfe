"""`outrider profile` on nodes that serve meanwhile."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

TIMEOUT_SECONDS = 240
PROMPT = " ".join(f"word {index}" for index in range(20))


def profile(*arguments):
    command = [sys.executable, "-m", "outrider.cli.main", "profile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


@contextmanager
def requests_on(running):
    """One request after the other, until left. No prompt is like another: none is found in a cache."""
    left = threading.Event()

    def ask():
        for number in itertools.count():
            if left.is_set():
                return
            running.generate(f"{number} {PROMPT}", max_tokens=32, temperature=0.0, ignore_eos=True)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            left.set()
        asking.result(TIMEOUT_SECONDS)


@pytest.mark.parametrize("role", ["decode_node", "prefill_node"])
def test_a_node_that_serves_tells_where_its_time_goes(running, tmp_path, role):
    output = tmp_path / "trace.json.gz"
    with requests_on(running):
        result = profile(
            "--role", role, "--target", running.router_address, "--steps", "4", "--traced-steps", "3",
            "--output", str(output),
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"{role.removesuffix('_node')}@127.0.0.1:" in result.stdout
    assert ": 4 steps in " in result.stdout
    for part in ("schedule ", "batch ", "forward", "emit "):  # phases of the forward: those that its kernels tell
        assert f"\n  {part}" in result.stdout, result.stdout
    assert f"trace: 3 steps in {output}" in result.stdout
    names = [event.get("name", "") for event in json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]]
    assert {"step 0", "step 1", "step 2"} <= set(names)
    assert any(name.startswith("aten::") for name in names)


def test_an_idle_node_is_not_waited_for_without_end(running):
    result = profile("--role", "decode_node", "--target", running.router_address, "--timeout", "0.5")
    assert result.returncode == 1
    assert ": 0 steps in " in result.stdout
    assert "fewer than 50 steps in 0.5 s" in result.stderr
    tokens, _ = running.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(tokens) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--node", "127.0.0.1:1"), "cannot be reached"),
        (("--node", "{router}"), "is no node that can be profiled"),
        (("--role", "decode_node", "--target", "{router}", "--steps", "0"), "num_steps is 0, must be 1 to 1000"),
        (("--role", "decode_node", "--traced-steps", "1"), "--traced-steps needs --output"),
        (("--role", "decode_node", "--output", "/nowhere/trace.json.gz"), "--output /nowhere/trace.json.gz"),
    ],
)
def test_what_cannot_be_profiled_is_one_clear_line(running, arguments, message):
    result = profile(*(argument.format(router=running.router_address) for argument in arguments))
    assert result.returncode == 1
    assert result.stderr.startswith("outrider profile: ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_draft_node_has_no_engine_to_profile(running):
    draft = next(node for node in running.cluster.nodes if node.role == "draft_node")
    result = profile("--node", draft.address)
    assert result.returncode == 1
    assert "no engine whose steps could be profiled" in result.stderr
