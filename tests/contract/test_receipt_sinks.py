"""The promises of directories and stores of receipts to the router that writes and to `outrider replay`."""

from __future__ import annotations

import pytest

from outrider.receipt import MAX_LINE_BYTES, Receipt, find_receipt
from router.durability.receipts.base import ReceiptLine
from router.durability.receipts.directory import DirectoryReceipts
from router.durability.receipts.valkey import ValkeyReceipts
from router.store_address import ValkeyAddress
from tests.support.receipts import receipt

PATIENCE_SECONDS = 30.0


class Directory:
    def __init__(self, folder):
        self._folder = folder
        self.number = 0

    def open(self):
        self.number += 1
        return DirectoryReceipts(self._folder, max_bytes=1 << 20, incarnation=bytes([self.number]))

    async def find(self, request_id):
        return find_receipt(self._folder, request_id)


class Store:
    def __init__(self, server, **bounds):
        self._address = ValkeyAddress.parse(server.url)
        self._bounds = bounds

    def open(self):
        return ValkeyReceipts(self._address, timeout_seconds=PATIENCE_SECONDS, **self._bounds)

    async def find(self, request_id):
        store = self.open()
        line = await store.find(request_id)
        await store.close()
        return None if line is None else Receipt.from_line(line)


@pytest.fixture(params=["directory", "store"])
def place(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path / "kept")
    return Store(request.getfixturevalue("store_server"))


def line(each):
    return ReceiptLine(each.request_id, each.to_line())


async def test_what_any_router_has_written_is_found_by_its_id_the_newest_first(place):
    first, second = place.open(), place.open()
    old, new, other = receipt("r {1}"), receipt("r {1}", hour=2), receipt('"r', tokens=5000)
    assert not await first.write([line(old), line(other)])
    assert not await second.write([line(new)])
    assert not await second.write([])
    assert await place.find("r {1}") == new
    assert await place.find('"r') == other
    assert await place.find("r") is None
    for sink in (first, second):
        await sink.close()
    assert await place.find('"r') == other, "it outlives its writers"


async def test_one_that_is_too_large_is_lost_by_its_reason_and_the_others_are_kept(place):
    sink = place.open()
    large = ReceiptLine("large", b"x" * (MAX_LINE_BYTES + 1))
    lost = await sink.write([line(receipt("a")), large, line(receipt("b"))])
    assert list(lost.values()) == [1]
    assert next(iter(lost)).startswith("larger than")
    assert await place.find("a") == receipt("a")
    assert await place.find("b") == receipt("b")
    assert await place.find("large") is None
    await sink.close()


async def test_a_store_keeps_so_many_the_oldest_go_first_and_none_for_longer_than_its_time(store_server):
    place = Store(store_server, max_receipts=3, lifetime_seconds=500.0)
    sink = place.open()
    for number in range(5):
        await sink.write([line(receipt(f"r-{number}"))])
    assert [await place.find(f"r-{number}") for number in range(5)] == [
        None, None, *(receipt(f"r-{number}") for number in range(2, 5))
    ]  # fmt: skip
    keys = await sink._server.keys("*")
    assert len(keys) == 4, "three receipts and their index"
    left = [await sink._server.pttl(key) for key in keys]
    assert all(0 < each <= 500_000 for each in left)
    await sink.close()


async def test_a_store_that_does_not_answer_loses_receipts_and_raises_nothing(store_server):
    sink = Store(store_server).open()
    store_server.kill()
    lost = await sink.write([line(receipt("a")), line(receipt("b"))])
    assert list(lost.values()) == [2]
    await sink.close()
