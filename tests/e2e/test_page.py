"""The router's page for a real cluster, in Chromium."""

from __future__ import annotations

import json
from urllib.request import urlopen

import pytest

from tests.support import chromium
from tests.support.html_tree import read

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium.find_chromium() is None, reason=chromium.MISSING),
]


def test_a_requests_timeline(running, tmp_path):
    token_ids, _ = running.generate("A long way to the page " * 20, max_tokens=24, temperature=0.0, ignore_eos=True)
    url = f"http://{running.cluster.node('router').metrics_address}/"
    with urlopen(f"{url}api/requests", timeout=60) as reply:
        newest = json.load(reply)["requests"][0]
    page = read(chromium.dump_dom(f"{url}#/requests/{newest['serial']}", tmp_path))
    assert page.one("h1").text == f"Request {newest['serial']} finished{newest['request_id']}"
    assert f"decoding {len(token_ids)} tokens in" in page.one("p", "sentence").text
    assert {lane.attributes["data-lane"] for lane in page.all("g", "lane")} == {"queue", "prefill", "kv", "decode"}
    chips = page.all("span", "chip", "own") + page.all("span", "chip", "accepted")
    assert len(chips) == len(token_ids)
    assert all("bare" in chip.classes for chip in chips)  # without telemetry.log_text no text is shown
    assert "hidden" in page.one("p", id="trouble").attributes
