"""What lies between a request's machine and the event loop: calls that are cancelled, steps that fail, what is kept."""

from __future__ import annotations

import asyncio

from outrider.receipt import Receipt
from router.observe.spans import RequestState

LABELS = {"model_name": "fake-model", "reason": "INTERNAL"}


def live(cluster, request_id="r"):
    return cluster.service.requests._by_key[request_id]


async def test_an_answer_that_waits_for_its_client_does_not_keep_the_request_as_it_was_sent(cluster):
    """It may be megabytes of text, and the budget of answers does not count it."""
    await cluster.serve()
    await cluster.generate(cluster.resumable(max_tokens=3))
    assert live(cluster)._driver.encoded.proto is None


async def test_a_prefill_call_that_is_cancelled_beneath_the_router_is_a_failed_transfer(cluster):
    """As gRPC cancels all calls of a channel that is closed."""
    await cluster.serve()
    transport = cluster.service.nodes.prefill_nodes[0].transport
    prefill = transport.prefill

    async def cancelled(_call):
        transport.prefill = prefill
        raise asyncio.CancelledError

    transport.prefill = cancelled
    answer = await asyncio.wait_for(cluster.generate(max_tokens=3), 10)
    assert len(answer.token_ids()) == 3
    await cluster.is_empty()


async def test_a_summary_that_cannot_be_made_fails_the_request_once_in_every_view(cluster, tmp_path):
    await cluster.serve(receipts=str(tmp_path / "kept"))

    def broken(_seconds):
        raise KeyError("a bug")

    cluster.context.queue.observe_service = broken
    failure = await cluster.fail(request_id="r", max_tokens=3)
    assert failure.reason == "INTERNAL"
    await cluster.is_empty()
    assert cluster.registry.get_sample_value("outrider:request_failures_total", LABELS) == 1
    (record,) = cluster.context.records
    assert record.outcome is RequestState.FAILED

    def lines():
        return [line for path in (tmp_path / "kept").glob("*.jsonl") for line in path.read_bytes().splitlines()]

    await cluster.eventually(lines)
    (receipt,) = map(Receipt.from_line, lines())
    assert (receipt.end, receipt.error) == ("failed", "INTERNAL")
