"""The pages on the router's metrics port: what they contain, and what they never contain."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.api import pages
from router.observe.records import Records
from tests.router.conftest import Cluster, eventually


class Http:
    """The pages of a router, requested in a thread as an HTTP connection does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.find_page = cluster.service.pages()

    async def ask(self, path):
        return await asyncio.to_thread(self.find_page, path)

    async def json(self, path):
        page = await self.ask(path)
        assert (page.status, page.content_type) == (200, "application/json")
        return json.loads(page.body)


@pytest.fixture
async def http(cluster) -> Http:
    """The pages of a router that does not serve yet."""
    await cluster.start()
    return Http(cluster)


async def serve(http, **fields):
    """Waits until the router serves, and returns the answer to one request."""
    await http.cluster.service.start(http.cluster.address)
    return await http.cluster.generate(request_id="r", **{"max_tokens": 6} | fields)


async def test_a_requests_page_has_the_agreed_fields_and_times_from_its_arrival(http):
    http.cluster.decode.tokens_per_step, http.cluster.decode.num_accepted_per_step = 3, 2
    answer = await serve(http)
    (summary,) = (await http.json("/api/requests"))["requests"]
    metrics = answer.summary.metrics
    assert summary["ttft_seconds"] == pytest.approx(metrics.ttft_seconds, abs=2e-6)
    assert 0 < summary["queue_seconds"] < summary["ttft_seconds"] < summary["e2e_seconds"] < summary["age_seconds"]
    for name in ("age_seconds", "queue_seconds", "ttft_seconds", "e2e_seconds"):
        del summary[name]
    assert summary == {
        "serial": 1,
        "request_id": "r",
        "state": "finished",
        "num_prompt_tokens": answer.started.num_prompt_tokens,
        "num_cached_tokens": answer.summary.usage.num_cached_tokens,
        "num_generated_tokens": 6,
        "num_samples": 1,
        "attempts": 1,
        "nodes": ["decode-0", "prefill-0"],
        "mean_acceptance_length": 3.0,
        "error": "",
    }
    record = await http.json("/api/requests/1")
    assert summary.items() <= record.items()
    assert (record["moves"], record["num_dropped_steps"]) == ([], 0)
    spans = {span["kind"]: span for span in record["spans"]}
    assert list(spans) == ["encode", "queue", "open", "prefill", "kv_transfer", "decode"]
    assert all(0 <= span["start"] <= span["end"] for span in spans.values())
    assert spans["queue"]["end"] <= spans["open"]["start"] <= spans["open"]["end"] <= spans["prefill"]["start"]
    assert [span["node"] for span in spans.values()] == ["", "", "decode-0", "prefill-0", "decode-0", "decode-0"]
    assert {**spans["decode"], "start": 0, "end": 0} == {
        "kind": "decode", "attempt": 0, "node": "decode-0", "start": 0, "end": 0, "num_tokens": 6, "bytes": None,
        "detail": "",
    }  # fmt: skip
    first, second = record["steps"]
    assert first.pop("at") <= second["at"]
    assert first == {
        "sample": 0, "attempt": 0, "node": "decode-0", "position": answer.started.num_prompt_tokens, "num_tokens": 3,
        "num_draft_tokens": 4, "num_accepted": 2, "wanted_drafts": True, "found_drafts": True, "batch": first["batch"],
    }  # fmt: skip


async def test_the_text_of_tokens_is_there_only_where_text_may_be_logged(http):
    http.cluster.decode.num_accepted_per_step, http.cluster.decode.rejected_draft_token_ids = 0, (104, 105)
    await serve(http, text="a secret prompt", max_tokens=3)
    (record,) = http.cluster.context.records
    assert not any(step.token_ids or step.rejected_token_ids for step in record.steps), "nor is it kept"
    for path in ("/api/requests", "/api/requests/1", "/api/cluster"):
        body = (await http.ask(path)).body.decode()
        assert "secret" not in body
        assert '"tokens"' not in body
        assert '"rejected"' not in body


async def test_the_text_of_tokens_is_shown_where_text_may_be_logged(cluster):
    cluster.shows_text = True
    await cluster.start()
    http = Http(cluster)
    cluster.decode.num_accepted_per_step, cluster.decode.rejected_draft_token_ids = 0, (104, 105)
    cluster.decode.script = cluster.says("hé!")
    await serve(http, max_tokens=8)
    steps = (await http.json("/api/requests/1"))["steps"]
    assert [step["tokens"] for step in steps] == [["h"], ["\ufffd"], ["\ufffd"], ["!"], ["<|endoftext|>"]]
    assert steps[0]["rejected"] == ["h", "i"]


async def test_the_clusters_page_is_there_before_a_node_serves_and_says_what_each_node_does(http):
    before = await http.json("/api/cluster")
    assert (before["model"], before["num_requests_running"]) == ("", 0)
    await serve(http)
    cluster = await http.json("/api/cluster")
    assert set(cluster) == {
        "version", "model", "numerics", "uptime_seconds", "num_requests_running", "num_requests_waiting",
        "num_waiting_tokens", "oldest_wait_seconds", "num_moves", "nodes",
    }  # fmt: skip
    assert cluster["model"] == http.cluster.decode.model.name
    prefill, decode = cluster["nodes"]
    assert set(decode) == {
        "name", "role", "state", "target", "step", "num_running", "num_waiting", "kv_blocks_total", "kv_blocks_free",
        "tokens_per_second", "mean_acceptance_length", "look_ahead_hit_rate", "kv_bytes_per_second", "numerics",
        "version", "is_late", "error",
    }  # fmt: skip
    assert (prefill["role"], decode["role"], decode["state"]) == ("prefill", "decode", "serving")
    assert (decode["name"], decode["target"]) == ("decode-0", http.cluster.decode.address)
    assert (decode["kv_blocks_total"], decode["is_late"], decode["error"]) == (1024, False, "")
    assert decode["version"] == http.cluster.decode.info().version
    assert cluster["numerics"] == decode["numerics"] == http.cluster.decode.model.numerics
    await http.cluster.decode.stop()
    await eventually(lambda: not http.cluster.service.nodes.decode_nodes)
    lost = (await http.json("/api/cluster"))["nodes"][1]
    assert lost["state"] == "lost"
    assert lost["error"].startswith("unreachable: ")


NOWHERE = (
    "/favicon.ico", "/index", "/../pages.py", "/page/index.html", "//etc/passwd", "/api", "/api/", "/api/requests/",
    "/api/requests/x", "/api/requests/-1", "/api/requests/١", "/api/requests/1/", "/api/requests/0",
    "/api/requests/2", "/api/requests/" + "9" * 5000,
)  # fmt: skip


async def test_what_is_not_there_is_not_found_with_a_clear_word(http):
    await serve(http)
    for path in NOWHERE:
        page = await http.ask(path)
        assert (page.status, page.content_type) == (404, "text/plain; charset=utf-8"), path
        assert b"/api/requests/N" in page.body or b"is unknown" in page.body
        assert len(page.body) < 300


async def test_the_page_is_all_files_of_its_folder(http):
    index = await http.ask("/")
    assert (index.status, index.content_type) == (200, "text/html; charset=utf-8")
    assert await http.ask("/index.html") == index
    assert (await http.ask("/page.js")).content_type == "text/javascript; charset=utf-8"
    assert (await http.ask("/page.css")).content_type == "text/css; charset=utf-8"


async def test_a_router_that_does_not_answer_in_time_says_so(http, monkeypatch):
    monkeypatch.setattr(pages, "LOOP_SECONDS", 0.01)
    page = http.find_page("/api/cluster")  # blocks the event loop, which therefore cannot answer
    assert (page.status, b"event loop is busy" in page.body) == (503, True)
    assert http.find_page("/").status == 200
    monkeypatch.undo()
    assert (await http.ask("/api/cluster")).status == 200, "its turn has been given back"


def test_a_router_that_has_stopped_says_so():
    loop = asyncio.new_event_loop()
    find_page = pages.RouterPages(None, None, Records(1), loop=loop)
    loop.close()
    page = find_page("/api/requests")
    assert (page.status, b"has stopped" in page.body) == (503, True)
