"""The router's page in Chromium, with fixed JSON. Chromium is started once for each view."""

from __future__ import annotations

import json

import pytest

from tests.router.api.page.records import cluster, moved_request, node, request, span, step, summary
from tests.router.api.page.stand_in import PAGE, StandIn, serving
from tests.support import chromium
from tests.support.html_tree import read

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium.find_chromium() is None, reason=chromium.MISSING),
]

MARKUP = "<img src=x onerror=\"document.title='taken over'\"><script>document.title='taken over'</script>"
WHEN_DRAWN = """
const find = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
while (!find("h1")) await new Promise((resume) => setTimeout(resume, 10));
const noted = {};
const note = (name, value) => {
  noted[name] = value;
  document.body.dataset.noted = JSON.stringify(noted);
};
"""
"""Script that precedes a user's actions. `note` records what the page shows."""


def title_of(page):
    """Returns the title in the page's head, because parts of pictures have titles, too."""
    return page.one("head").one("title").text


def noted(page):
    return json.loads(page.one("body").attributes["data-noted"])


@pytest.fixture
def look(tmp_path):
    """look(fragment, answers, num_answers=None, user="") returns (the page's root, the server)."""

    def look(fragment, answers, num_answers=None, user=""):
        stand_in = StandIn(answers, num_answers, user and WHEN_DRAWN + user)
        with serving(stand_in) as url:
            html = chromium.dump_dom(
                url + fragment, tmp_path / "profile", view_seconds=2.5
            )  # long enough for three requests
        return read(html), stand_in

    return look


def test_the_overview_names_sick_nodes_and_marks_figures_that_are_old(look):
    refusal = "the connection was refused"
    nodes = (
        node("prefill-0"),
        node("prefill-1", is_late=True),
        node("decode-0", kv_blocks_free=250),
        node("decode-1", state="lost", error=refusal),
        node(f"decode-{MARKUP}", state="draining", error=MARKUP),
        node("draft-0", state="starting"),
    )
    page, stand_in = look("", {"/api/cluster": cluster(*nodes)}, num_answers=1)
    lost = page.one("tr", "node", data_node="decode-1")
    assert "bad" in lost.classes
    assert lost.one("span", "state").text == "lost"
    assert refusal in page.text
    late = page.one("tr", "node", data_node="prefill-1")
    assert [word.text for word in late.all("span", "state")] == ["serving", "late"]
    assert "good" in page.one("tr", "node", data_node="decode-0").classes
    assert "75 % of 1,000 blocks" in page.one("tr", "node", data_node="decode-0").text
    verdict = page.one("p", "verdict")
    assert "bad" in verdict.classes
    assert verdict.text.startswith("3 of 6 nodes in trouble: prefill-1 (late), decode-1 (lost), decode-<img")
    assert [role.text for role in page.all("tr", "role")] == ["prefill 2", "decode 3", "draft 1"]
    # A node's name is shown as text, and only the page's own script ran.
    assert not page.all("img")
    assert [script.attributes.get("src") for script in page.all("script")] == ["page.js"]
    assert title_of(page) == "3 sick – Outrider"
    # The router ends after its first answer. The page keeps asking, and reports that.
    assert "stale" in page.one("body").classes
    trouble = page.one("p", id="trouble")
    assert "hidden" not in trouble.attributes
    assert "The router does not answer" in trouble.text
    assert stand_in.asked.count("/api/cluster") > 2


def test_a_router_without_nodes(look):
    page, stand_in = look("", {"/api/cluster": cluster(model="", numerics="", num_requests_waiting=0)})
    assert page.one("p", "verdict").text == "No node has reported to this router yet."
    assert not page.all("table")
    assert "hidden" in page.one("p", id="trouble").attributes
    files = {f"/{file.name}" for file in PAGE.iterdir()} - {"/index.html"}
    assert set(stand_in.asked) - {"/favicon.ico"} == {"/", "/api/cluster"} | files


def test_figures_that_the_page_does_not_understand_are_said_to_be_none(look):
    page, stand_in = look(
        "", {"/api/cluster": {"nodes": 5}}
    )  # as if another version's router had started while the page was open
    trouble = page.one("p", id="trouble")
    assert "hidden" not in trouble.attributes
    assert trouble.text.startswith("The router does not answer (")
    assert stand_in.asked.count("/api/cluster") > 1


def test_the_table_of_requests(look):
    requests = [
        summary(19, state="running", e2e_seconds=None, age_seconds=2.5, request_id=MARKUP),
        summary(18, state="failed", error=MARKUP, queue_seconds=None, ttft_seconds=None, e2e_seconds=2.0),
        summary(17, request_id="a\u202eb\x00c", attempts=3),
    ]
    sorting = """
        const serials = () => all("tr[data-serial]").map((row) => row.dataset.serial);
        all("button").find((button) => button.textContent === "Slowest first").click();
        note("slowest", serials());
        find("button[data-key=total]").click();
        note("quickest", serials());
        find("input").value = "FAILED img";
        find("input").dispatchEvent(new Event("input"));
        note("filtered", [serials(), find("[role=status]").textContent]);
        find("input").value = "";
        all("button").find((button) => button.textContent === "Newest first").click();
    """
    page, _ = look("#/requests", {"/api/requests": {"requests": requests}}, user=sorting)
    assert noted(page) == {
        "slowest": ["19", "18", "17"],
        "quickest": ["17", "18", "19"],
        "filtered": [["18"], "1 of 3"],
    }
    rows = page.all("tr")[1:]
    assert [row.attributes["data-serial"] for row in rows] == ["19", "18", "17"]
    assert rows[0].one("a").attributes["href"] == "#/requests/19"
    assert rows[0].one("span", "id").text == MARKUP
    assert rows[0].one("td", data_label="total (s)").text == "2.500"
    assert rows[1].one("small", "error").text == MARKUP
    assert rows[1].one("td", data_label="queue (s)").text == "–"
    assert rows[2].one("span", "id").text == "a‹U+202E›b‹U+0000›c"
    assert rows[2].one("td", data_label="moves").text == "2"
    assert not page.all("img")
    assert title_of(page) == "Requests – Outrider"


def test_the_timeline_of_a_request_that_moved(look):
    record = moved_request()
    first, second = record["steps"][:2]
    first |= {"tokens": [" the", MARKUP, "\n"], "rejected": [" do\u202eg", MARKUP]}
    second |= {"tokens": [" cat", " sat", " on"], "rejected": [" a", " b"]}
    record |= {"error": MARKUP, "request_id": MARKUP}
    zooming = """
        const press = (key) => find(".timeline").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        const ticks = () => all(".ticks text").map((tick) => tick.textContent);
        note("whole", ticks());
        press("ArrowRight");
        note("first step", find(".details").textContent);
        note("outlined", [all(".timeline .chosen").length, find(".group.chosen").dataset.step]);
        press("End");
        note("last step", find(".details").textContent.split(" · ")[0]);
        for (const _ of "123") press("+");
        note("closer", [ticks()[0], all(".chip").length]);
        const { left, top } = find(".timeline").getBoundingClientRect();
        press("0");
        const bar = find("[data-lane=prefill] path").getBBox();
        const [x, y] = [left + bar.x + bar.width * 0.1, top + bar.y + 5];
        find(".timeline").dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
        note("pointed at", find(".details").textContent);
        const frame = find("[data-lane=kv] path:not(.faint)").getBBox();
        const centre = { clientX: left + frame.x + 3, clientY: top + frame.y + 5 };
        find(".timeline").dispatchEvent(new PointerEvent("pointermove", centre));
        note("a frame", find(".details").textContent);
    """
    page, stand_in = look("#/requests/17", {"/api/requests/17": record}, user=zooming)
    assert noted(page) == {
        "whole": ["0.0 s", "0.5 s", "1.0 s", "1.5 s", "2.0 s", "2.5 s", "3.0 s"],
        "first step": (
            "step on decode-0 · at 2.27 s, 58 ms · batch 5 · position 242–244 · 3 tokens: 1 own, 2 accepted · "
            f"4 drafted, 2 rejected · “ the” “{MARKUP}” “↵”"
        ),
        "outlined": [1, "0"],
        "last step": "step on decode-1",
        "closer": ["2.65 s", 18],  # only steps of the second node
        "a frame": "KV frame from prefill-0 · at 2.05 s, 70 ms · 2.9 MB, 42.1 MB/s",
        "pointed at": "prefill chunk on prefill-0 · at 1.90 s, 0.20 s · 128 tokens",
    }
    assert page.one("p", "sentence").text == (
        "3.02 s: 1.90 s in the queue, 0.35 s prefill (2 chunks), 20 ms KV transfer not hidden by compute, "
        "0.35 s decoding 30 tokens in 10 steps, 0.40 s lost to 1 move (decode_lost at 2.60 s)."
    )
    assert page.one("p", "sentence").one("strong").text == "1.90 s in the queue"
    lanes = [(lane.attributes["data-lane"], lane.attributes["data-node"]) for lane in page.all("g", "lane")]
    assert lanes == [
        ("queue", "router"),
        ("prefill", "prefill-0"),
        ("kv", "decode-0"),
        ("decode", "decode-0"),
        ("decode", "decode-1"),
    ]
    steps = {
        lane.attributes["data-node"]: lane.all("path", "step") for lane in page.all("g", "lane", data_lane="decode")
    }
    assert [path.classes[1] for path in steps["decode-0"]] == ["c-own", "c-accepted", "c-rejected"]
    assert [path.classes[1] for path in steps["decode-1"]] == ["c-own", "c-accepted"]
    assert {path.attributes["data-steps"] for path in steps["decode-1"]} == {"6"}
    assert page.one("g", "marker", data_marker="move").text == "decode_lost"
    chips = page.all("span", "group")[0].all(None, "chip")
    assert [(chip.tag, chip.classes[1], chip.text) for chip in chips] == [
        ("span", "accepted", " the"),
        ("span", "accepted", MARKUP),
        ("span", "own", "↵"),
        ("del", "rejected", " do‹U+202E›g"),
        ("del", "rejected", MARKUP),
    ]
    bare = page.all("span", "group")[2].all(None, "chip")  # a step without text
    assert [chip.classes[1] for chip in bare] == ["accepted", "own", "rejected", "rejected", "rejected"]
    assert all("bare" in chip.classes for chip in bare)
    assert not page.all("img")
    assert title_of(page) == "Request 17 – Outrider"
    assert stand_in.asked.count("/api/requests/17") == 1  # it has ended, so it is not requested again


def test_a_long_answer_is_a_few_bars_and_a_cut_record_says_so(look):
    steps = [step(0.5 + 0.01 * index, 100 + 2 * index, 3, 1, sample=index % 2) for index in range(4000)]
    steps[400]["num_draft_tokens"] = 2**32 - 1  # a faulty node may send any number
    spans = [span("queue", 0.0, 0.1), span("prefill", 0.1, 0.5, "prefill-0"), span("decode", 0.5, None, "decode-0")]
    record = request(5, spans, steps, [], state="running", e2e_seconds=None, age_seconds=41.0, num_samples=2)
    page, stand_in = look("#/requests/5", {"/api/requests/5": {**record, "num_dropped_steps": 41}})
    assert "it has 4,000 steps, and 41 steps more took place" in page.text
    assert page.one("p", "sentence").text.startswith("So far 41.0 s: ")
    lanes = page.all("g", "lane", data_lane="decode")
    assert [lane.attributes["data-node"] for lane in lanes] == ["decode-0, sample 0", "decode-0, sample 1"]
    for lane in lanes:
        for path in lane.all("path", "step"):
            assert path.attributes["data-steps"] == "2000"
            assert int(path.attributes["data-bars"]) < 700
    assert 0 < len(page.all(None, "chip")) <= 1200
    assert "more tokens: zoom in to see them" in page.text
    assert stand_in.asked.count("/api/requests/5") > 1  # it is running, so it is requested again
