from __future__ import annotations

import json
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


PREFILL = Profile(node="prefill", seconds=0.5, steps=(step(StepKind.PROMPT, idle=100, cpu_turn=60, forward_linear=40),))
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
    assert first == "prefill: 1 steps, which cover 0.20 of 0.50 s; a token has 0 bytes of K and V, 0 of features"
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


@pytest.fixture
def page():
    """A router's page that knows one request, one that was aborted, and one that moved."""
    requests = {
        7: REQUEST,
        8: REQUEST | {"serial": 8, "state": "aborted"},
        9: REQUEST | {"serial": 9, "attempts": 2},
    }

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self):
            serial = self.path.removeprefix("/api/requests/")
            found = requests[int(serial)] if serial.isdecimal() else {"requests": list(requests.values())}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


def test_the_rows_of_a_request_add_up_to_its_time(page):
    assert ended_serials(page) == {7, 9}
    requests = list(request_times(f"http://{page}/", {7, 9}))
    lines = [line.strip() for line in request_lines(requests, [PREFILL, DECODE])]
    assert lines == [
        "a request, mean of 1: 12 prompt tokens, 1.0 chunks, 2 steps",
        "encode                        10.0 ms    1.4%",
        "queue                         30.0 ms    4.3%",
        "open (grant)                  10.0 ms    1.4%",
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
    with pytest.raises(PeerLostError, match=r"http://127\.0\.0\.1:1/api/requests"):
        ended_serials("127.0.0.1:1")


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
