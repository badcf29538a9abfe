"""Fills one reservation with a prompt's KV: by a prefill node, by another one, at last by the decode node itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from outrider.errors import PeerLostError
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.session import Granted, KvFailed, KvReady, OpenSequenceGroup, RetargetSequenceGroup
from router.hedge_budget import HedgeBudget
from router.placement import Demand, Place
from router.request_record import AttemptFigures
from router.sessions import DecodeSession

ID_BYTES = 16
MAX_TRANSFERS = 4
"""After so many that failed the decode node computes the prompt itself."""
PREFILL_ANSWER_SECONDS = 0.5
"""How long a finished answer waits for the prefill node's figures."""


class HandOff:
    """Owned by an attempt, on the event loop. `run` ends once the KV is there or on its way without a transfer.

    A transfer that fails is tried again whole under a new transfer id, so that the KV of two
    transfers is never mixed; the reservation on the decode node stays meanwhile.
    """

    def __init__(
        self,
        *,
        opened: OpenSequenceGroup,
        demand: Demand,
        place: Place,
        session: DecodeSession,
        figures: AttemptFigures,
        fingerprint: str,
        open_timeout_seconds: float,
        kv_ready_timeout_seconds: float,
        hedges: HedgeBudget,
        on_prefill: Callable[[], None],
        on_moved: Callable[[PeerLostError], None],
    ) -> None:
        """`on_prefill`: a prefill node begins; `on_moved`: one has failed, and its work goes elsewhere."""
        self._opened = opened
        self._demand = demand
        self._place = place
        self._session = session
        self._figures = figures
        self._fingerprint = fingerprint
        self._open_timeout_seconds = open_timeout_seconds
        self._kv_ready_timeout_seconds = kv_ready_timeout_seconds
        self._hedges = hedges
        self._on_prefill = on_prefill
        self._on_moved = on_moved
        loop = asyncio.get_running_loop()
        self._transfer_id = opened.transfer_id
        self._ready: asyncio.Future[None] = loop.create_future()
        self._failed: asyncio.Future[PeerLostError] = loop.create_future()  # of the transfer under way
        self._granted: asyncio.Future[Granted] = loop.create_future()  # after a retarget
        self._prefill: asyncio.Task[PrefillFigures] | None = None

    async def run(self, granted: Granted) -> None:
        """Raises: PeerLostError when the decode node does not answer."""
        num_failed = 0
        try:
            while granted.kv_address:
                failure = await self._transfer(granted)
                if failure is None:
                    return
                num_failed += 1
                self._on_moved(failure)
                answer = await self._retarget(may_transfer=num_failed < MAX_TRANSFERS)
                if answer is None:
                    return
                granted = answer
        finally:
            self._place.release_prefill()

    async def wait_for_figures(self) -> None:
        """The prefill node's answer may come a little after the answer's end."""
        if self._prefill is not None:
            await asyncio.wait((self._prefill,), timeout=PREFILL_ANSWER_SECONDS)
            self._take_figures(self._prefill)

    def close(self) -> None:
        """Stops the prefill under way. Idempotent."""
        if self._prefill is not None:
            self._prefill.cancel()
        for future in (self._ready, self._failed, self._granted):
            future.cancel()

    # ------------------------------------------------------------ what the decode node says

    def on_granted(self, granted: Granted) -> None:
        if granted.transfer_id == self._transfer_id and not self._granted.done():
            self._granted.set_result(granted)

    def on_kv_ready(self, ready: KvReady) -> None:
        """Of whichever transfer: one that was given up may have been complete already."""
        if not self._ready.done():
            self._ready.set_result(None)

    def on_kv_failed(self, failed: KvFailed) -> None:
        if failed.transfer_id == self._transfer_id:
            name = self._place.prefill.name
            self.give_up(PeerLostError(f"the KV transfer from {name} failed: {failed.message}", node=name))

    def give_up(self, error: PeerLostError) -> None:
        """The transfer under way counts no more; another one is tried."""
        if not self._failed.done():
            self._failed.set_result(error)

    def on_standing(self) -> None:
        """Of the prefill node. One that is late is not waited for where another could do its work."""
        prefill = self._place.prefill
        if prefill.is_late and self._place.has_other_prefill() and self._hedges.may_move(prefill):
            self._hedges.add_move(prefill)
            self.give_up(PeerLostError(f"prefill node {prefill.name} is late", node=prefill.name))

    # ------------------------------------------------------------ one transfer

    async def _transfer(self, granted: Granted) -> PeerLostError | None:
        """None once the KV is ready, else why the transfer failed; then nothing of it goes on."""
        link = self._place.prefill
        self._on_prefill()
        prefill = self._prefill = asyncio.create_task(link.prefill(self._call(granted)), name="prefill")
        link.add_listener(self)
        try:
            await asyncio.wait((prefill, self._ready, self._failed), return_when=asyncio.FIRST_COMPLETED)
            failure = _failure_of(prefill)
            if failure is None and prefill.done():  # the push was committed: the decode node's word follows
                await asyncio.wait(
                    (self._ready, self._failed),
                    timeout=self._kv_ready_timeout_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            link.remove_listener(self)
        if self._ready.done():
            prefill.add_done_callback(self._take_figures)
            return None
        prefill.cancel()
        await asyncio.wait((prefill,))
        if self._failed.done():
            return self._failed.result()
        return failure or PeerLostError(f"the prompt's KV did not arrive from {link.name}", node=link.name)

    def _call(self, granted: Granted) -> PrefillCall:
        token_ids = self._demand.token_ids
        return PrefillCall(
            sequence_group_id=self._opened.sequence_group_id,
            transfer_id=granted.transfer_id,
            request_id=self._opened.request_id,
            token_ids=token_ids[: len(token_ids) - granted.num_tokens_to_compute],
            kv_address=granted.kv_address,
            decode_incarnation=self._place.decode.incarnation,
            held_prefix_length=granted.held_prefix_length,
            priority=self._opened.priority,
            fingerprint=self._fingerprint,
            cache_salt=self._opened.cache_salt,
        )

    async def _retarget(self, *, may_transfer: bool) -> Granted | None:
        """The grant for another try; None when the KV was ready after all. Raises: PeerLostError."""
        has_node = may_transfer and self._place.change_prefill(self._demand)
        self._transfer_id = os.urandom(ID_BYTES) if has_node else b""
        loop = asyncio.get_running_loop()
        self._failed, self._granted = loop.create_future(), loop.create_future()
        self._session.retarget(
            RetargetSequenceGroup(sequence_group_id=self._opened.sequence_group_id, transfer_id=self._transfer_id)
        )
        await asyncio.wait(
            (self._granted, self._ready), timeout=self._open_timeout_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if self._ready.done():
            return None
        if not self._granted.done():
            name = self._place.decode.name
            raise PeerLostError(f"decode node {name} does not answer a retarget", node=name)
        granted = self._granted.result()
        self._figures.num_tokens_to_compute = granted.num_tokens_to_compute
        return granted

    def _take_figures(self, prefill: asyncio.Task[PrefillFigures]) -> None:
        if prefill.done() and not prefill.cancelled() and prefill.exception() is None:
            self._figures.prefill = prefill.result()


def _failure_of(prefill: asyncio.Task[PrefillFigures]) -> PeerLostError | None:
    if not prefill.done() or prefill.cancelled():
        return None
    error = prefill.exception()
    if error is None or isinstance(error, PeerLostError):
        return error
    raise error
