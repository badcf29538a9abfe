"""Receipts of answers for `outrider replay`: their content, their limits, and failures to write them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading

import pytest
from structlog.testing import capture_logs

from outrider.config.resolve import load_config
from outrider.errors import ConfigError
from outrider.receipt import Receipt, find_receipt, read_receipts
from outrider.v1 import router_pb2
from outrider.wire.receipt import request_from_receipt
from router.api.clients import TokenFile
from router.config import RouterConfig
from router.durability.receipts import directory, keeper
from router.durability.receipts.base import ReceiptLine
from router.durability.receipts.directory import DirectoryReceipts
from tests.router.conftest import PATIENCE_SECONDS, read_rest, refused, told
from tests.support.receipts import receipt

SEGMENT_BYTES = 1 << 16
MAX_BYTES = 16 * SEGMENT_BYTES


def lines_of(folder):
    return [line for path in sorted(folder.glob("receipts-*.jsonl")) for line in path.read_bytes().splitlines()]


def lost(cluster):
    return cluster.registry.get_sample_value("outrider:receipts_lost_total", {"model_name": "fake-model"})


async def kept(cluster, folder, number=1):
    """Waits until there are `number` receipts, and returns all that have been written."""
    await cluster.eventually(lambda: len(lines_of(folder)) >= number, what="receipts")
    return [Receipt.from_line(line) for line in lines_of(folder)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


async def test_a_receipt_has_the_complete_request_its_tokens_and_who_computed_them(cluster, folder):
    await cluster.serve(receipts=str(folder))
    request = cluster.request(
        request_id="r-1",
        max_tokens=9,
        n=2,
        temperature=0.7,
        logit_bias={5: 0.5},
        regex="[a-z]+",
        stop=router_pb2.StopConditions(strings=["zz"]),
    )
    request.sampling.ClearField("seed")
    answer = await cluster.generate(request)
    (receipt,) = await kept(cluster, folder)
    assert (receipt.request_id, receipt.end, receipt.error, receipt.num_moves) == ("r-1", "whole", "", 0)
    assert receipt.model.fingerprint == "f" * 64
    assert [str(node) for node in receipt.nodes] == [
        "decode-0 decode fake exact (fake)", "prefill-0 prefill fake exact (fake)"
    ]  # fmt: skip
    assert [list(sample.token_ids) for sample in receipt.samples] == [answer.token_ids(0), answer.token_ids(1)]
    assert {sample.finish_reason for sample in receipt.samples} == {"length"}
    complete = request_from_receipt(receipt.request)
    assert list(complete.token_ids.ids) == list(b"a prompt")
    assert complete.sampling.seed == answer.started.seed
    assert complete.speculation.method == router_pb2.VERIFICATION_METHOD_COUPLED
    for unchanged in (request, complete):  # all other fields are as the client sent them
        unchanged.sampling.ClearField("seed")
        unchanged.ClearField("speculation")
        unchanged.ClearField("prompt")
    complete.ClearField("token_ids")
    request.ClearField("text")
    assert complete == request


async def test_neither_a_token_nor_a_salt_nor_a_clients_name_is_in_it(cluster, folder, tmp_path):
    path = tmp_path / "tokens"
    hashes = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in (("alice", "t0ken"), ("bob", "b"))}
    path.write_text("".join(f"{name} sha256:{each}\n" for name, each in hashes.items()))
    await cluster.serve(receipts=str(folder), clients=TokenFile(path))
    call = cluster.stub.Complete(cluster.request(request_id="r-1"), metadata=(("authorization", "Bearer t0ken"),))
    await asyncio.wait_for(call, PATIENCE_SECONDS)
    await kept(cluster, folder)
    assert cluster.decode.opened[0].options.cache_salt
    (line,) = lines_of(folder)
    for secret in (b"t0ken", b"alice", b"salt", hashes["alice"].encode()):
        assert secret not in line
    assert b'"r-1"' in line


async def test_an_answer_that_is_aborted_left_or_failed_says_so_and_has_its_tokens(cluster, folder):
    cluster.decode.step_seconds = 0.01
    await cluster.serve(receipts=str(folder), no_node_timeout_seconds=0.2)
    for ending in ("aborted", "left", "failed"):
        call = cluster.stub.Generate(cluster.request(request_id=ending, max_tokens=400))
        while not (await asyncio.wait_for(call.read(), PATIENCE_SECONDS)).HasField("delta"):
            pass
        match ending:
            case "aborted":
                await cluster.stub.Abort(router_pb2.AbortRequest(request_id=ending))
                await read_rest(call)
            case "left":
                call.cancel()
            case "failed":
                await cluster.decode.stop()
    receipts = {each.request_id: each for each in await kept(cluster, folder, 3)}
    ends = {name: (each.end, each.error, each.samples[0].finish_reason) for name, each in receipts.items()}
    assert ends == {
        "aborted": ("aborted", "", "aborted"), "left": ("aborted", "", ""), "failed": ("failed", "NO_NODE", "")
    }  # fmt: skip
    assert all(0 < len(each.samples[0].token_ids) < 400 for each in receipts.values())


async def test_a_request_that_is_refused_has_no_receipt(cluster, folder):
    cluster.decode.answers_opens = False
    await cluster.serve(receipts=str(folder), open_timeout_seconds=0.1, no_node_timeout_seconds=0.1)
    assert (await cluster.fail(request_id="refused")).reason == "REQUEST_LOSES_NODES"
    cluster.decode.answers_opens = True
    await cluster.generate(request_id="answered")
    assert [each.request_id for each in await kept(cluster, folder)] == ["answered"]


async def test_a_moved_answer_names_every_node_in_the_order_of_its_use(node_pair, folder):
    await node_pair.serve(receipts=str(folder))
    task, busy, free = await node_pair.begin(200, request_id="moved")
    await busy.stop()
    answer = await node_pair.finish(task)
    (receipt,) = await kept(node_pair, folder)
    assert receipt.num_moves >= 1
    assert [node.name for node in receipt.nodes if node.role == "decode"] == [busy.name, free.name]
    assert list(receipt.samples[0].token_ids) == answer.token_ids()


async def test_the_router_that_finishes_an_answer_keeps_it_whole_and_the_one_before_it_nothing(router_pair, folder):
    router_pair.num_tokens = 60
    await router_pair.serve(receipts=str(folder))
    call, _, deltas = await router_pair.begin()
    next_position = deltas[-1].start_position + len(deltas[-1].token_ids)
    messages = await router_pair.resume({0: next_position})  # on the second router, while the first is alive
    first = router_pair.first
    assert (await refused(call)).reason == "RESUMED_ELSEWHERE"
    receipts = await kept(first, folder)
    await first.service.stop()
    assert len(lines_of(folder)) == 1, "only one of them"
    tokens = [token_id for delta in deltas for token_id in delta.token_ids] + told(messages)
    assert list(receipts[0].samples[0].token_ids) == tokens
    assert len(tokens) == router_pair.num_tokens


async def test_at_its_end_a_router_writes_what_waits(cluster, folder):
    await cluster.serve(receipts=str(folder))
    for number in range(5):
        await cluster.generate(request_id=f"r-{number}")
    await cluster.service.stop()
    assert [Receipt.from_line(line).request_id for line in lines_of(folder)] == [f"r-{number}" for number in range(5)]


# ------------------------------------------------------------ files


def receipt_line(request_id, *, size=1000):
    return ReceiptLine(request_id, b'{"id": "%s", "x": "%s"}\n' % (request_id.encode(), b"x" * size))


def make_directory(folder, incarnation=b"me"):
    return DirectoryReceipts(folder, max_bytes=MAX_BYTES, incarnation=incarnation)


async def test_files_stay_in_the_bound_the_oldest_go_first_and_they_are_the_owners_alone(folder):
    sink = make_directory(folder)
    for number in range(15):
        assert not await sink.write([receipt_line(f"{number}-{part}") for part in range(100)])
    paths = sorted(folder.iterdir())
    assert sum(path.stat().st_size for path in paths) <= MAX_BYTES
    assert all(path.stat().st_size <= SEGMENT_BYTES for path in paths)
    ids = [json.loads(line)["id"] for line in lines_of(folder)]
    assert len(ids) > 900
    assert ids == [f"{number}-{part}" for number in range(15) for part in range(100)][-len(ids) :]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.name.startswith(f"receipts-{b'me'.hex()}-") for path in paths)
    await sink.close()


async def test_routers_share_a_directory_and_one_whose_file_was_removed_begins_another(folder):
    slow, busy = make_directory(folder, b"slow"), make_directory(folder, b"busy")
    await slow.write([receipt_line("slow-0")])
    for number in range(15):
        await busy.write([receipt_line(f"{number}-{part}") for part in range(100)])
    assert not any(b"slow" in line for line in lines_of(folder)), "the oldest went"
    await slow.write([receipt_line("slow-1")])
    assert sum(b"slow-1" in line for line in lines_of(folder)) == 1
    await slow.close()
    await busy.close()


async def test_a_receipt_that_would_fill_a_segment_is_lost_and_the_others_are_not(folder):
    sink = make_directory(folder)
    lost = await sink.write([receipt_line("large", size=SEGMENT_BYTES), receipt_line("small")])
    assert sum(lost.values()) == 1
    assert [json.loads(line)["id"] for line in lines_of(folder)] == ["small"]
    await sink.close()


@pytest.mark.parametrize("num_written", [0, 9])
async def test_a_disk_that_stays_full_gets_no_file_for_each_receipt_that_is_lost(folder, monkeypatch, num_written):
    sink, write = make_directory(folder), os.write
    await sink.write([receipt_line("kept")])
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:num_written]))
    assert sum((await sink.write([receipt_line(str(number)) for number in range(50)])).values()) == 50
    monkeypatch.undo()
    await sink.write([receipt_line("again")])
    await sink.close()
    assert len([*folder.iterdir()]) == 2
    assert [line[:13] for line in lines_of(folder) if line.endswith(b"}")] == [b'{"id": "kept"', b'{"id": "again']


async def test_what_is_no_file_of_a_writer_is_neither_counted_nor_removed_nor_waited_for(folder, tmp_path):
    sink, elsewhere = make_directory(folder), tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * MAX_BYTES)
    others = [folder / f"receipts-{name}.jsonl" for name in ("directory", "link", "pipe")]
    others[0].mkdir()
    os.utime(others[0], (0, 0))
    others[1].symlink_to(elsewhere)
    os.mkfifo(others[2])
    for number in range(20):
        assert not await sink.write([receipt_line(f"{number}-{part}") for part in range(60)])
    await sink.close()
    assert all(path.is_symlink() or path.exists() for path in others)
    assert len([*folder.iterdir()]) > 10 + len(others), "a link's target is not ours to count"
    others[1].unlink()
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await asyncio.to_thread(find_receipt, folder, "none") is None


async def test_a_full_disk_loses_receipts_says_so_once_and_again_when_it_is_over(cluster, folder, monkeypatch):
    write, is_full = os.write, threading.Event()

    def write_or_fail(descriptor, data):
        if is_full.is_set() and data.startswith(b'{"receipt"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_or_fail)
    await cluster.serve(receipts=str(folder))
    is_full.set()
    with capture_logs() as logs:
        for number in range(3):
            await cluster.generate(request_id=f"lost-{number}")
            await cluster.eventually(lambda number=number: lost(cluster) == number + 1)
        is_full.clear()
        await cluster.generate(request_id="kept")
        assert [each.request_id for each in await kept(cluster, folder)] == ["kept"]
        await cluster.service.stop()
    said = [entry["event"] for entry in logs if entry["event"].startswith("receipts")]
    assert said == ["receipts are lost", "receipts are written again"]
    assert lost(cluster) == 3


async def test_a_disk_that_hangs_holds_up_neither_an_answer_nor_the_routers_end(cluster, folder, monkeypatch):
    is_released, append = threading.Event(), directory.SegmentWriter.append

    def wait(writer, line):
        assert is_released.wait(PATIENCE_SECONDS)
        append(writer, line)

    monkeypatch.setattr(directory.SegmentWriter, "append", wait)
    monkeypatch.setattr(keeper, "MAX_WAITING", 2)
    monkeypatch.setattr(keeper, "STOP_SECONDS", 0.05)
    await cluster.serve(receipts=str(folder))
    try:
        for number in range(5):
            await cluster.generate(request_id=f"r-{number}")
        await cluster.eventually(lambda: lost(cluster) == 2)  # of the five receipts, one is being written and two wait
        await cluster.service.stop()
        assert lost(cluster) == 5
    finally:
        is_released.set()


def test_a_directory_that_cannot_be_written_to_is_named_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"router\.receipts .*file.* cannot be written to: .*name another"):
        make_directory(tmp_path / "file" / "kept")


async def test_a_store_is_that_of_the_router_with_its_password(store_server):
    config = RouterConfig(store=store_server.url, receipts="store", store_timeout_seconds=PATIENCE_SECONDS)
    sink = keeper.make_sink(config, incarnation=b"me", environ={"OUTRIDER_STORE_PASSWORD": "s3cret"})
    assert sink.name == f"{store_server.url}/0"
    (reason,) = await sink.write([receipt_line("a")])  # the server rejects a password because it has none
    assert "AUTH" in reason
    assert "s3cret" not in reason
    await sink.close()


def test_a_store_that_is_none_is_named():
    with pytest.raises(ConfigError, match=r"router\.receipts=store.*needs store=valkey://"):
        load_config({"router": RouterConfig}, file=None, environ={}, overrides=["router.receipts=store"])


# ------------------------------------------------------------ reading


@pytest.fixture
def line():
    return receipt("r-1").to_line()


def test_a_torn_last_line_is_passed_over_and_any_other_that_is_damaged_is_named(line, tmp_path):
    path = tmp_path / "receipts-00-000000.jsonl"
    path.write_bytes(line + line[:-9])
    assert len(list(read_receipts(path))) == 1
    assert find_receipt(tmp_path, "r-1") is not None
    path.write_bytes(line + line[:-9] + b"\n" + line)
    with pytest.raises(ConfigError, match=r"000000\.jsonl, line 2: not a receipt"):
        list(read_receipts(path))
    with pytest.raises(ConfigError, match="line 2"):
        find_receipt(tmp_path, "r-1")


def test_the_newest_receipt_of_an_id_is_found(line, tmp_path):
    older, newer = (line.replace(b'"ended_at":"2', b'"ended_at":"%d' % era) for era in (1, 3))
    (tmp_path / "receipts-00-000000.jsonl").write_bytes(newer + line)
    (tmp_path / "receipts-00-000001.jsonl").write_bytes(older)
    assert find_receipt(tmp_path, "r-1") == Receipt.from_line(newer)
    assert find_receipt(tmp_path, "r-2") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda receipt: b"[" * 100_000, "nested too deeply"),
        (lambda receipt: b"[]", "not a JSON object"),
        (lambda receipt: {**receipt, "receipt": 2}, "receipt is 2; this version reads 1"),
        (lambda receipt: {**receipt, "samples": [{**receipt["samples"][0], "token_ids": [-1]}]}, "token ids"),
        (lambda receipt: {**receipt, "samples": [{**receipt["samples"][0], "token_ids": [True]}]}, "token ids"),
        (lambda receipt: {**receipt, "nodes": [{"name": "n"}]}, r"nodes\[0\]\.role is missing"),
        (lambda receipt: {**receipt, "model": 3}, "model is not an object"),
        (lambda receipt: {**receipt, "end": "well"}, "end is 'well'"),
        (lambda receipt: {**receipt, "num_moves": "one"}, "num_moves is not of the type int"),
        (lambda receipt: {**receipt, "request": []}, "request is not of the type"),
    ],
)  # fmt: skip
def test_a_hostile_line_is_refused_by_what_is_wrong_with_it(line, change, message):
    changed = change(json.loads(line))
    with pytest.raises(ValueError, match=message):
        Receipt.from_line(changed if isinstance(changed, bytes) else json.dumps(changed).encode())


def test_a_line_that_has_no_end_is_not_read_whole(line, tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.receipt.MAX_LINE_BYTES", 100)
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(line)
    with pytest.raises(ConfigError, match=r"receipts\.jsonl, line 1: .*more than 100 bytes"):
        list(read_receipts(path))
