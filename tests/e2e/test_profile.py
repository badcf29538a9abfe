"""`outrider profile` on nodes that serve requests."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from outrider.cli.main import main
from outrider.engine.cpu_kernels.paths import choose_kernels

TIMEOUT_SECONDS = 240
PROFILE_SECONDS = 60.0
"""Maximum duration of a profile. It ends earlier if it has all of its steps."""
PROMPT = " ".join(f"word {index}" for index in range(20))


@contextmanager
def requests_on(running):
    """Sends one request after the other until the block ends. All prompts differ, so that there is no prefix hit."""
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
def test_a_node_that_serves_tells_where_its_time_goes(running, capsys, role):
    command = ["profile", "--role", role, "--target", running.router_address, "--steps", "4"]
    with requests_on(running):
        assert main([*command, "--seconds", str(PROFILE_SECONDS)]) == 0
    shown = capsys.readouterr().out
    assert f"{role.removesuffix('_node')}@127.0.0.1:" in shown
    assert ": 4 steps, " in shown
    for part in ("schedule ", "batch ", "forward", "emit "):  # the forward's own parts depend on the kernels
        assert f"\n  {part}" in shown, shown


def test_a_trace_is_of_what_torch_computes(running, tmp_path, capsys):
    output = tmp_path / "trace.json.gz"
    command = ["profile", "--role", "decode_node", "--target", running.router_address, "--output", str(output)]
    with requests_on(running):
        status = main([*command, "--traced-steps", "3", "--steps", "4", "--seconds", str(PROFILE_SECONDS)])
    shown = capsys.readouterr()
    if choose_kernels().library is not None:
        assert status == 1
        assert "native kernels compute on this node, and a trace is torch's" in shown.err
        assert not output.stat().st_size
        return
    assert status == 0
    assert f"trace: 3 steps in {output}" in shown.out
    names = [event.get("name", "") for event in json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]]
    assert {"step 0", "step 1", "step 2"} <= set(names)
    assert any(name.startswith("aten::") for name in names)


def test_a_cluster_tells_where_its_requests_time_goes(running, capsys):
    page = next(node.metrics_address for node in running.cluster.nodes if node.role == "router")
    with requests_on(running):
        command = ["profile", "--target", running.router_address, "--page", page]
        assert main([*command, "--steps", "48", "--seconds", str(PROFILE_SECONDS)]) == 0
    shown = capsys.readouterr().out
    for column in ("prefill@127.0.0.1:", "decode@127.0.0.1:"):
        assert column in shown
    assert "\na request, mean of " in shown, shown
    for row in ("queue ", "prefill forward", "KV out and in", "decode forward", "decode: unexplained", "total "):
        assert f"\n  {row}" in shown, shown


def test_an_idle_node_is_not_waited_for_without_end(running, capsys):
    assert main(["profile", "--role", "decode_node", "--target", running.router_address, "--seconds", "0.5"]) == 1
    shown = capsys.readouterr()
    assert ": 0 steps, " in shown.out
    assert "a node without steps serves no requests" in shown.err
    tokens, _ = running.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(tokens) == 4


def test_what_has_no_engine_cannot_be_profiled(running, capsys):
    draft = next(node for node in running.cluster.nodes if node.role == "draft_node")
    for address, message in (
        (draft.address, "no engine whose steps could be profiled"),
        (running.router_address, "is not a node that can be profiled"),
    ):
        assert main(["profile", "--node", address]) == 1
        assert message in capsys.readouterr().err
