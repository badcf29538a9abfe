"""Adapters (LoRA) on a prefill node: which rows have one, what is shared, and what is refused."""

from __future__ import annotations

import pytest

from outrider.errors import MismatchError
from outrider.request import Adapter
from tests.support.adapters import ScriptedAdapters

SQL, LAW = Adapter("sql", "1" * 64), Adapter("law", "2" * 64)
PROMPT = list(range(100, 250))


@pytest.fixture
def adapters(rig):
    for adapter in (SQL, LAW):
        rig.adapters._by_name[adapter.name] = adapter
    return rig.adapters


def test_rows_have_the_adapter_of_their_request(rig, adapters, monkeypatch):
    seen, forward = [], rig.runner.forward
    monkeypatch.setattr(rig.runner, "forward", lambda rows, **options: seen.extend(rows) or forward(rows, **options))
    for adapter in (SQL, None):
        _, blocks = rig.prefill(PROMPT, adapter=adapter)
        assert rig.decode.cache.context(blocks, len(PROMPT)) == PROMPT
    seeds = [None if row.adapter is None else row.adapter._seed for row in seen]
    assert set(seeds[: len(seeds) // 2]) == {adapters.find(SQL)._seed}
    assert set(seeds[len(seeds) // 2 :]) == {None}


def test_the_prefix_cache_is_shared_by_requests_of_one_adapter_only(rig, adapters):
    cached = [rig.prefill(PROMPT, adapter=adapter)[0].num_cached_tokens for adapter in (SQL, SQL, LAW, None, None)]
    assert [bool(each) for each in cached] == [False, True, False, False, True]


def test_an_adapter_that_the_node_does_not_have_is_refused_by_name(rig, adapters):
    adapters.unload("sql")
    job, _ = rig.submit(PROMPT, adapter=SQL)
    error = rig.result(job)
    assert isinstance(error, MismatchError)
    assert error.message == f"the prefill node does not have the adapter {SQL}"
    assert not rig.computed
    assert rig.loop.prompt_tokens.num_outstanding == 0
    assert isinstance(rig.adapters, ScriptedAdapters)
