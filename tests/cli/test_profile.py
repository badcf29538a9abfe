from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from outrider.cli.main import main
from outrider.cli.profile_tables import engine_lines, request_lines
from outrider.cli.request_times import ended_serials, request_times
from outrider.errors import PeerLostError
from outrider.profile import Profile, ProfiledStep, StepKind


def step(kind=StepKind.DECODE, **milliseconds):
    nanoseconds = {part.replace("forward_", "forward."): round(each * 1e6) for part, each in milliseconds.items()}
    return ProfiledStep(kind=kind, num_rows=2, num_sequences=1, nanoseconds=nanoseconds, event_loop_nanoseconds=500_000)


PREFILL = Profile(
    node="prefill",
    seconds=0.5,
    steps=(step(StepKind.PROMPT, idle=100, cpu_turn=60, forward_linear=40),),
    weights="bfloat16",
)
DECODE = Profile(
    node="decode",
    seconds=0.5,
    steps=(
        step(idle=50, forward_rest=2, forward_linear=6),
        step(forward_rest=4, forward_linear=8),
        step(StepKind.VERIFY, sampling=30),
    ),
    kv_bytes_per_token=23040,
    feature_bytes_per_token=1152,
)


def test_the_columns_of_a_node_add_up_to_its_time():
    first, second, empty, *table, last = engine_lines([PREFILL, DECODE])
    assert first == (
        "prefill: 1 steps, which cover 0.20 of 0.50 s; weights: bfloat16; a token has 0 bytes of K and V, 0 of features"
    )
    assert (
        second == "decode: 3 steps, which cover 0.10 of 0.50 s; a token has 23,040 bytes of K and V, 1,152 of features"
    )
    assert empty == ""
    assert [" ".join(line.split()) for line in table] == [
        "share, ms a step prefill decode decode",
        "prompt, 1 steps decode, 2 steps verify, 1 steps",
        "2 rows, 1 sequences 2 rows, 1 sequences 2 rows, 1 sequences",
        "idle 50.0% 100.000 50.0% 25.000 0.0% 0.000",
        "cpu_turn 30.0% 60.000 0.0% 0.000 0.0% 0.000",
        "forward.linear 20.0% 40.000 14.0% 7.000 0.0% 0.000",
        "forward.rest 0.0% 0.000 6.0% 3.000 0.0% 0.000",
        "sampling 0.0% 0.000 0.0% 0.000 30.0% 30.000",
        "total 100.0% 200.000 70.0% 35.000 30.0% 30.000",
        "beside: event loop 0.2% 0.500 1.0% 0.500 0.5% 0.500",
    ]
    assert len({len(line) for line in table}) == 1
    assert last == "  forward passes of all nodes: 12.0% of the wall clock"


def test_a_node_may_say_anything():
    nothing = Profile(node="\x1b[2Jx" * 9, seconds=0.0, steps=(step(), step(StepKind.PROMPT, **{"p" * 99: 0})))
    lines = [*engine_lines([nothing]), *request_lines([], [nothing])]
    assert "0.0% of the wall clock" in lines[-2]
    assert len({len(line) for line in lines[2:-2]}) == 1  # columns stay aligned


def span(kind, start, end, node=""):
    return {"kind": kind, "start": start, "end": end, "node": node}


REQUEST = {
    "serial": 7,
    "state": "finished",
    "attempts": 1,
    "num_prompt_tokens": 12,
    "ttft_seconds": 0.5,
    "e2e_seconds": 0.7,
    "age_seconds": 3.5,
    "num_dropped_steps": 0,
    "spans": [
        span("encode", 0.0, 0.01),
        span("queue", 0.01, 0.04),
        span("open", 0.04, 0.05),
        span("prefill", 0.05, 0.4, "prefill"),
        span("decode", 0.35, 0.69, "decode"),
        span("prefill_chunk", 0.2, 0.3, "prefill"),
        span("kv_frame", 0.25, 0.28, "prefill"),
        span("kv_frame", 0.29, 0.33, "prefill"),
    ],
    "steps": [{"at": 0.5}, {"at": 0.65}],
}


@contextmanager
def serving(answer):
    """Serves a page and yields its host:port; `answer` gets the path and returns bytes, or None for a missing page."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self):
            found = answer(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


@pytest.fixture
def page():
    """A router's page with one complete request, and others that are left out, each for a different reason."""
    cut = [span("decode", 0.35, None, "decode"), *(each for each in REQUEST["spans"] if each["kind"] != "decode")]
    requests = {
        7: REQUEST,
        8: REQUEST | {"serial": 8, "state": "aborted"},
        9: REQUEST | {"serial": 9, "attempts": 2},
        10: REQUEST | {"serial": 10, "num_dropped_steps": 3},
        11: REQUEST | {"serial": 11, "spans": cut},
        12: REQUEST | {"serial": 12, "spans": [*REQUEST["spans"], span("prefill", 0.04, 0.05, "prefill")]},
        13: REQUEST | {"serial": 13, "steps": []},
    }

    def answer(path):
        serial = path.removeprefix("/api/requests/")
        found = requests.get(int(serial)) if serial.isdecimal() else {"requests": list(requests.values())}
        return None if found is None else json.dumps(found).encode()

    with serving(answer) as address:
        yield address


def test_the_rows_of_a_request_add_up_to_its_time(page):
    assert ended_serials(page) == {7, 9, 10, 11, 12, 13}
    requests = list(request_times(f"http://{page}/", {*ended_serials(page), 14}))  # the router no longer has 14
    lines = [line.strip() for line in request_lines(requests, [PREFILL, DECODE])]
    assert lines == [
        "a request, mean of 1: 12 prompt tokens, 1.0 chunks, 2 steps",
        "encode                        10.0 ms    1.4%",
        "queue                         30.0 ms    4.3%",
        "open                          10.0 ms    1.4%",
        "prefill cpu_turn              60.0 ms    8.6%",
        "prefill forward.linear        40.0 ms    5.7%",
        "prefill: others, wire        150.0 ms   21.4%",
        "KV out and in, exposed        30.0 ms    4.3%",
        "KV commit                     20.0 ms    2.9%",
        "decode: joins the batch      133.3 ms   19.0%",
        "decode forward.linear          9.3 ms    1.3%",
        "decode forward.rest            4.0 ms    0.6%",
        "decode sampling               20.0 ms    2.9%",
        "decode: unexplained          133.3 ms   19.0%",
        "router: unexplained           50.0 ms    7.1%",
        "total                        700.0 ms",
    ]
    assert sum(float(line.split()[-3]) for line in lines[1:-1]) == pytest.approx(700.0, abs=0.5)


def test_a_page_that_does_not_answer_is_named():
    for page in ("127.0.0.1:1", "127.0.0.1:none"):
        with pytest.raises(PeerLostError, match=rf"http://{page}/api/requests: "):
            ended_serials(page)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'{"requests": [{"serial": "\x1b"}]}',
        None,
        *(
            json.dumps(REQUEST | changed).encode()
            for changed in (
                {"spans": [{}]},
                {"steps": "x"},
                {"ttft_seconds": None},
                {"e2e_seconds": float("nan")},
                {"e2e_seconds": 10**400},
                {"num_prompt_tokens": "12"},
            )
        ),
    ],
)
def test_a_page_of_something_else_is_named(answer):
    with serving(lambda _path: answer) as page:
        with pytest.raises(PeerLostError, match="no figures of requests") as caught:
            ended_serials(page)
        if answer and answer.startswith(b'{"serial"'):
            with pytest.raises(PeerLostError, match="no figures of requests") as caught:
                list(request_times(page, {1}))
    assert str(caught.value).isprintable()


def test_a_page_that_hangs_up_is_named():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        host, port = silent.getsockname()

        def hang_up():
            silent.accept()[0].close()

        hanging_up = Thread(target=hang_up)
        hanging_up.start()
        with pytest.raises(PeerLostError, match=r"/api/requests: "):
            ended_serials(f"{host}:{port}")
        hanging_up.join(30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--node", "127.0.0.1:1"), "cannot be reached"),
        (("--role", "decode_node", "--steps", "0"), "num_steps is 0, must be 1 to 1000"),
        (("--seconds", "0"), "timeout_seconds is 0, must be 0.1 to 600"),
        (("--role", "decode_node", "--traced-steps", "1"), "--traced-steps needs --output"),
        (("--role", "decode_node", "--output", "/nowhere/trace.json.gz"), "--output /nowhere/trace.json.gz"),
    ],
)
def test_what_cannot_be_profiled_is_one_clear_line(capsys, arguments, message):
    assert main(["profile", *arguments]) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("outrider profile: ")
    assert message in shown


@pytest.fixture
def profiled(monkeypatch):
    """profiled(*profiles) sets a node's answers, one (profile, trace) for each call."""

    def answer(*profiles):
        answers = iter(profiles)

        async def fetch(_channel, _options, *, target):
            assert target == "node:1"
            return next(answers)

        monkeypatch.setattr("outrider.cli.profile.fetch_profile", fetch)

    return answer


def test_a_trace_without_steps_is_not_said_to_be_one(profiled, tmp_path, capsys):
    profiled((DECODE, b""), (Profile(node="decode"), b""))
    assert main(["profile", "--node", "node:1", "--output", str(tmp_path / "trace.json.gz")]) == 1
    shown = capsys.readouterr()
    assert "trace:" not in shown.out
    assert "no step to trace within 30 s" in shown.err


def test_what_a_node_says_is_not_for_a_terminal_to_obey(profiled, capsys):
    profiled((replace(DECODE, node="\x1b[2J"), b""))
    assert main(["profile", "--node", "node:1"]) == 0
    shown = capsys.readouterr().out
    assert "?[2J: 3 steps" in shown
    assert shown.replace("\n", "").isprintable()
