"""Makes receipts of answers that have ended, and writes them off the token path."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from outrider import __version__
from outrider.errors import RESUMED_ELSEWHERE
from outrider.node import ModelInfo
from outrider.receipt import ABORTED, FAILED, WHOLE, Receipt, ReceiptModel, ReceiptRouter, ReceiptSample
from outrider.request import Request
from outrider.service.telemetry.logging import get_logger
from outrider.v1 import router_pb2
from outrider.wire.receipt import request_to_receipt
from outrider.wire.request import complete_proto
from router.config import STORE, RouterConfig
from router.durability.receipts.base import ReceiptLine, ReceiptSink
from router.durability.receipts.directory import DirectoryReceipts
from router.observe.record import RequestRecord
from router.requests.answer import Answer
from router.store_address import store_address

MAX_WAITING = 256
MAX_WAITING_TOKENS = 1 << 22
MAX_BATCH = 64
STOP_SECONDS = 1.0
"""Seconds that the router's stop waits for receipts to be written."""

_log = get_logger("receipts")


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The content of a receipt. The receipt's line is made in another thread."""

    proto: router_pb2.GenerateRequest  # as the client sent it
    request: Request
    receipt: Receipt  # without the request

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + sum(len(sample.token_ids) for sample in self.receipt.samples)

    def line(self) -> ReceiptLine:
        request = request_to_receipt(complete_proto(self.proto, self.request))
        return ReceiptLine(self.receipt.request_id, replace(self.receipt, request=request).to_line())


def make_sink(
    config: RouterConfig, *, incarnation: bytes, environ: Mapping[str, str] = os.environ
) -> ReceiptSink | None:
    """Makes the sink that `router.receipts` names. Returns None if receipts are off. Raises: ConfigError."""
    match config.receipts:
        case "":
            return None
        case name if name == STORE:
            address = store_address(config.store, environ)
            from router.durability.receipts.valkey import ValkeyReceipts

            return ValkeyReceipts(address, timeout_seconds=config.store_timeout_seconds)
        case folder:
            path = Path(folder).expanduser()
            return DirectoryReceipts(path, max_bytes=config.receipts_bytes, incarnation=incarnation)


def end_request(
    proto: router_pb2.GenerateRequest, answer: Answer, record: RequestRecord, model: ModelInfo, *, router: str
) -> EndedRequest:
    """Returns the content of the receipt of an answer that has ended. `router` is the router's name."""
    failure = answer.failure
    is_whole = answer.summary is not None and all(sample.is_whole for sample in answer.samples)
    receipt = Receipt(
        request_id=answer.request.request_id,
        ended_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        end=FAILED if failure is not None else WHOLE if is_whole else ABORTED,
        error="" if failure is None else failure.reason,
        e2e_seconds=round((record.ended_at or time.monotonic()) - record.arrived_at, 6),
        num_moves=record.num_moves,
        router=ReceiptRouter(name=router, version=__version__),
        model=ReceiptModel(name=model.name, revision=model.revision, fingerprint=model.fingerprint, dtype=model.dtype),
        nodes=tuple(record.stamps),
        request={},
        samples=tuple(
            ReceiptSample(
                start_position=sample.start_position,
                finish_reason="" if sample.finished is None else sample.finished.reason.value,
                token_ids=tuple(sample.token_ids_from(sample.start_position)),
            )
            for sample in answer.samples
        ),
    )
    return EndedRequest(proto, answer.request, receipt)


class ReceiptKeeper:
    """A short queue of receipts and the task that writes them. Owned by the event loop.

    Receipts that do not fit, for example because the disk is slow, are dropped and counted.
    """

    def __init__(self, sink: ReceiptSink, *, router: str, on_lost: Callable[[int], None]) -> None:
        """`router` is the router's name. `on_lost` is called with the number of lost receipts."""
        self._sink = sink
        self._router = router
        self._on_lost = on_lost
        self._waiting: asyncio.Queue[EndedRequest] = asyncio.Queue()
        self._num_waiting_tokens = 0
        self._num_unwritten = 0  # number of receipts that are waiting or being written
        self._num_lost = 0  # number of receipts lost since all were last written
        self._work = asyncio.create_task(self._run(), name="receipts")

    def keep(self, proto: router_pb2.GenerateRequest, answer: Answer, record: RequestRecord, model: ModelInfo) -> None:
        """Queues the receipt of a request that has ended.

        A refused request gets no receipt. A request that another router has taken over gets its receipt there.
        """
        if answer.started is None or (answer.failure is not None and answer.failure.reason == RESUMED_ELSEWHERE):
            return
        ended = end_request(proto, answer, record, model, router=self._router)
        num_waiting_tokens = self._num_waiting_tokens + ended.num_tokens
        num_waiting = self._waiting.qsize()
        if num_waiting >= MAX_WAITING or (num_waiting and num_waiting_tokens > MAX_WAITING_TOKENS):
            self._lose(1, "the receipt queue is full")
            return
        self._num_waiting_tokens = num_waiting_tokens
        self._num_unwritten += 1
        self._waiting.put_nowait(ended)

    async def stop(self) -> None:
        """Writes the waiting receipts, for at most `STOP_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._waiting.join()
        self._work.cancel()
        if self._num_unwritten:
            self._lose(self._num_unwritten, "the router is stopping")
            return  # closing the file could block on a hung disk
        await self._sink.close()

    async def _run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            self._num_waiting_tokens -= sum(ended.num_tokens for ended in batch)
            await self._write(batch)
            self._num_unwritten -= len(batch)
            for _ in batch:
                self._waiting.task_done()

    async def _write(self, batch: list[EndedRequest]) -> None:
        try:
            lines = await asyncio.to_thread(lambda: [ended.line() for ended in batch])
            lost = await self._sink.write(lines)
        except Exception as error:  # noqa: BLE001 later receipts still have to be written
            _log.exception("receipts could not be made", error=str(error))
            lost = {"they could not be made": len(batch)}
        for reason, number in lost.items():
            self._lose(number, reason)
        if self._num_lost and not lost and self._waiting.empty():
            _log.info("receipts are written again", receipts=self._sink.name, num_lost=self._num_lost)
            self._num_lost = 0

    def _lose(self, number: int, reason: str) -> None:
        """Counts lost receipts. After the first loss, logs no other until writing has recovered and none are lost."""
        if not number:
            return
        self._on_lost(number)
        if not self._num_lost:
            _log.warning("receipts are lost", receipts=self._sink.name, reason=reason)
        self._num_lost += number
