"""The harness of benchmarks/peers on scripted peers."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from outrider.bench.prompts import BenchPrompt

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
MODULES = ("asking", "peer", "process", "session", "table")
PROMPTS = [BenchPrompt(id=f"p{number}", kind=kind, content=(number,)) for number, kind in enumerate(("chat", "code"))]
LINES = """
    import json, os, sys, threading, time
    def say(line):
        os.write(1, (line + "\\n").encode())
    say("a library's banner")
    say(json.dumps({"ready": True}))
    def answer(asked):
        for index in range(NUM_TOKENS):
            time.sleep(0.005)
            say(json.dumps({"id": asked["id"], "tokens": [asked["prompt"][0] + index]}))
        say(json.dumps({"id": asked["id"], "done": True}))
    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),)).start()
"""
STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child])
    print("up", file=sys.stderr, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def peers():
    """The scripts' modules, by name; they import each other as scripts do."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def make_setup(peers, tmp_path):
    def make(*, speculation=False):
        return peers["peer"].Setup(
            model=tmp_path, dtype="float32", speculation=speculation, max_tokens=6, num_threads=1,
            log=tmp_path / "log", start_seconds=20.0, answer_seconds=20.0,
        )  # fmt: skip

    return make


class LinePeer:
    name = "scripted"
    has_lookup = True
    most_clients = 2

    def __init__(self, peers, *, num_tokens=6):
        self.peers = peers
        self.script = f"NUM_TOKENS = {num_tokens}\n" + textwrap.dedent(LINES)
        self.processes = []

    @contextmanager
    def start(self, setup):
        command = [sys.executable, "-c", self.script]
        with self.peers["process"].ServerProcess(command, environment={}, log=setup.log, speaks_lines=True) as process:
            self.processes += process.processes()
            server = self.peers["asking"].LineServer(process, seconds=setup.answer_seconds)
            process.wait_until(lambda: server.is_ready, seconds=setup.start_seconds)
            asker = self.peers["asking"].StreamAsker(server.stream, max_tokens=setup.max_tokens)
            yield self.peers["peer"].Server(process, asker)


def run(peers, peer, setup, *, number=0, levels=(1, 2, 4)):
    return peers["session"].run_session(peer, setup, PROMPTS, number=number, levels=levels, session_seconds=20.0)


def test_a_session_measures_the_levels_that_a_peer_can_take_and_ends_it(peers, make_setup):
    peer = LinePeer(peers)
    result = run(peers, peer, make_setup())
    assert result.error == ""
    assert sorted(result.levels) == [1, 2]
    single, double = result.levels[1], result.levels[2]
    assert (single.num_requests, double.num_requests) == (2, 4)
    assert set(single.stream_by_kind) == {"chat", "code"}
    assert 0 < single.stream_tokens_per_second < 2 / 0.005  # a first token that was read late makes the others fast
    assert single.ttft_p50_milliseconds >= 5
    assert result.first_answer == (0, 1, 2, 3, 4, 5)
    assert result.resident_mib > 1
    assert not any(process.is_running() for process in peer.processes)


def test_too_few_tokens_are_a_failure_that_the_table_names(peers, make_setup):
    good = run(peers, LinePeer(peers), make_setup(), levels=(1,))
    bad = run(peers, LinePeer(peers, num_tokens=5), make_setup(speculation=True), number=1, levels=(1,))
    assert "5 tokens came, of 6" in bad.error
    heading, _, row, _, failure = peers["table"].as_text([good, bad]).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == len(heading.strip("|").split("|"))
    assert cells[:2] == ["scripted", "float32"]
    assert float(cells[2]) > 0
    assert cells[3] == "– / – / –"
    assert cells[4].startswith("failed")
    assert failure.startswith("failed: scripted float32 lookup, round 1: ")


def test_a_peer_that_is_never_ready_is_given_up_with_everything_it_started(peers, tmp_path):
    process_module = peers["process"]
    log = tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(STUBBORN)]
    process_module.END_SECONDS = 0.5
    with process_module.ServerProcess(command, environment={}, log=log) as process:
        process.wait_until(lambda: "up" in log.read_text(), seconds=60)
        started = process.processes()
        assert len(started) == 2
        with pytest.raises(process_module.PeerError, match=r"not ready after 1 s: up \("):
            process.wait_until(lambda: False, seconds=1)
    _, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []


def test_a_peer_that_ends_by_itself_says_its_last_words(peers, tmp_path):
    process_module = peers["process"]
    command = [sys.executable, "-c", "raise SystemExit('no such instruction')"]
    with (
        process_module.ServerProcess(command, environment={}, log=tmp_path / "log") as process,
        pytest.raises(process_module.PeerError, match="ended with status 1: no such instruction"),
    ):
        process.wait_until(lambda: False, seconds=60)


class EventHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/events":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        for token_id in range(body["n"]):
            self.wfile.write(f"data: {json.dumps({'ids': [token_id + body['prompt'][0]]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *arguments):
        return


def test_server_sent_events_become_tokens(peers):
    server = ThreadingHTTPServer(("127.0.0.1", 0), EventHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for path, expected in (("/events", [[7], [8], [9]]), ("/nothing", None)):
            stream = peers["asking"].http_stream(
                server.server_port, path, {"n": 3}, read=lambda event: event["ids"], seconds=10
            )
            if expected is None:
                with pytest.raises(peers["process"].PeerError, match="HTTP 404"):
                    list(stream([7]))
            else:
                assert list(stream([7])) == expected
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_server_that_dies_ends_its_answers(peers, tmp_path):
    script = "import sys, time; print('{\"ready\": true}', flush=True); sys.stdin.readline()"
    process_module = peers["process"]
    with process_module.ServerProcess(
        [sys.executable, "-c", script], environment={}, log=tmp_path / "log", speaks_lines=True
    ) as process:
        server = peers["asking"].LineServer(process, seconds=120)
        process.wait_until(lambda: server.is_ready, seconds=60)
        started = time.monotonic()
        with pytest.raises(process_module.PeerError, match="the server has ended"):
            list(server.stream([1]))
        assert time.monotonic() - started < 60


def test_a_server_that_talks_nonsense_ends_its_answers(peers, tmp_path):
    script = "import sys; print('{\"ready\": true}', flush=True); sys.stdin.readline(); print('{nonsense', flush=True)"
    process_module = peers["process"]
    with process_module.ServerProcess(
        [sys.executable, "-c", script], environment={}, log=tmp_path / "log", speaks_lines=True
    ) as process:
        server = peers["asking"].LineServer(process, seconds=60)
        process.wait_until(lambda: server.is_ready, seconds=60)
        with pytest.raises(process_module.PeerError, match="does not speak JSON"):
            list(server.stream([1]))


def test_a_session_that_takes_too_long_says_so(peers, make_setup):
    peer = LinePeer(peers, num_tokens=100_000)
    result = peers["session"].run_session(peer, make_setup(), PROMPTS, number=0, levels=(1,), session_seconds=0.5)
    assert result.error == "not done after 0.5 s"
    assert not any(process.is_running() for process in peer.processes)
