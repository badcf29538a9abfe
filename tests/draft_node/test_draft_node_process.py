"""The draft node as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import grpc

from outrider.v1 import node_pb2, node_pb2_grpc, router_pb2


def test_it_serves_says_who_it_is_and_ends_with_status_0_on_sigterm(tmp_path):
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "draft_node"],
        env={**os.environ, "OUTRIDER_ANNOUNCE_FD": str(write_end)},
        pass_fds=[write_end],
        stderr=(tmp_path / "stderr").open("wb"),
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end) as announcements:
            listening, serving = json.loads(announcements.readline()), json.loads(announcements.readline())
        assert serving["serving"]
        assert serving["proposer"] == "ngram"
        with grpc.insecure_channel(listening["address"], options=[("grpc.enable_http_proxy", 0)]) as channel:
            info = node_pb2_grpc.NodeServiceStub(channel).GetNode(node_pb2.GetNodeRequest(), timeout=60)
        assert info.role == router_pb2.NODE_ROLE_DRAFT
        assert info.model.proposer == "ngram"
        assert info.model.vocabulary_fingerprint == ""
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, (tmp_path / "stderr").read_text()
    finally:
        process.kill()
        process.wait()


def test_help_lists_the_settings_without_loading_torch():
    code = (
        "import sys, draft_node.__main__ as node\n"
        "try: node.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr
    for key in ("draft_node.proposer", "draft_node.remembered_tokens", "draft_node.model"):
        assert key in finished.stdout
