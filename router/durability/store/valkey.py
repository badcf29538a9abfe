"""The store that several routers share: Valkey, or another server that speaks its protocol."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from valkey.asyncio import Connection, ConnectionPool, SSLConnection, Valkey
from valkey.exceptions import ResponseError, ValkeyError

from outrider.errors import StoreError
from router.durability.store import scripts
from router.durability.store.base import (
    Renewal,
    SpansRefusedError,
    StoredAnswer,
    StoredRequest,
    TokenLog,
    TokenSpan,
    already_running,
    model_mismatch,
)
from router.store_address import ValkeyAddress

MAX_CONNECTIONS = 16
MAX_SPANS_PER_SCRIPT = 1000
"""Maximum spans per script. Limited, because the server answers no other client while a script runs."""


class ValkeyServer:
    """Connections to a server, opened on first use and again after a loss."""

    def __init__(self, address: ValkeyAddress, *, timeout_seconds: float) -> None:
        self.name = str(address)
        self._timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._pool = ConnectionPool(
            connection_class=SSLConnection if address.is_tls else Connection,
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=address.password,
            # The client's own timeouts are off, because in Python 3.11 they may swallow the timeout of `_answering`,
            # which limits the whole exchange.
            socket_timeout=None,
            socket_connect_timeout=None,
            **({"ssl_check_hostname": True} if address.is_tls else {}),
        )
        self._server: Any = Valkey(connection_pool=self._pool)  # Any: Valkey's annotations allow only text arguments

    async def close(self) -> None:
        async with self._answering():
            await self._pool.disconnect()

    async def _run_pipeline(self, script: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> list[Any]:
        """Runs a script for many (keys, arguments) in one round trip. Returns an answer or a ResponseError for each.

        Raises: StoreError if the server does not answer, or if every call fails.
        """
        if not calls:
            return []
        digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()  # the server's id for the script
        async with self._answering():
            pipeline = self._server.pipeline(transaction=False)
            pipeline.script_load(script)  # every time, because a restarted server has lost the script
            for keys, arguments in calls:
                pipeline.evalsha(digest, len(keys), *keys, *arguments)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            failed = [answer for answer in answers[1:] if isinstance(answer, ResponseError)]
            if len(failed) == len(calls):
                raise failed[0]  # the call's own error, because the pipeline's error quotes the command
            return answers[1:]

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Limits the duration of one exchange with the server. Raises: StoreError for any failure of the exchange."""
        try:
            async with asyncio.timeout(self._timeout_seconds), self._slots:
                yield
        except TimeoutError as error:
            raise StoreError(f"{self.name} did not answer within {self._timeout_seconds} s") from error
        except (ValkeyError, OSError) as error:
            raise StoreError(f"{self.name}: {error}") from error


class ValkeyAnswerStore(ValkeyServer):
    """An `AnswerStore` on a Valkey server."""

    def __init__(self, address: ValkeyAddress, *, owner: bytes, timeout_seconds: float, lease_seconds: float) -> None:
        super().__init__(address, timeout_seconds=timeout_seconds)
        self._owner = owner
        self._lease_ms = _milliseconds(lease_seconds)

    async def create(self, stored: StoredRequest) -> None:
        fields: tuple[str | bytes | int, ...] = (
            *("fingerprint", stored.fingerprint),
            *("window", _milliseconds(stored.resume_window_seconds)),
            *("start", stored.start_position),
            *("request", stored.request),
            *("numerics", stored.numerics),
        )
        if not await self._run(scripts.CREATE, stored.request_id, self._lease_ms, *fields):
            raise already_running(stored.request_id)

    async def append(self, spans: Iterable[TokenSpan]) -> None:
        by_id: dict[str, list[TokenSpan]] = {}
        for span in spans:
            by_id.setdefault(span.request_id, []).append(span)
        calls = [
            (
                request_id,
                [
                    argument
                    for span in found[first : first + MAX_SPANS_PER_SCRIPT]
                    for argument in _append_arguments(span)
                ],
            )
            for request_id, found in by_id.items()
            for first in range(0, len(found), MAX_SPANS_PER_SCRIPT)
        ]
        answers = await self._run_many(scripts.APPEND, calls)
        refused = {
            request_id: answer
            for (request_id, _), answer in zip(calls, answers, strict=True)
            if isinstance(answer, ResponseError)
        }
        if refused:
            message = f"{self.name} refused the tokens of {len(refused)} requests: {next(iter(refused.values()))}"
            raise SpansRefusedError(message, frozenset(refused))

    async def renew(self, request_ids: Iterable[str]) -> Renewal:
        request_ids = tuple(request_ids)
        states = await self._run_many(scripts.RENEW, [(request_id, [self._lease_ms]) for request_id in request_ids])

        def those(state: int) -> frozenset[str]:
            return frozenset(itertools.compress(request_ids, (found == state for found in states)))

        return Renewal(taken=those(scripts.TAKEN), missing=those(scripts.MISSING), aborted=those(scripts.ABORTED))

    async def finish(self, request_ids: Iterable[str]) -> None:
        await self._run_many(scripts.FINISH, [(request_id, ()) for request_id in request_ids])

    async def delete(self, request_ids: Iterable[str]) -> None:
        await self._run_many(scripts.DELETE, [(request_id, ()) for request_id in request_ids])

    async def read(self, request_id: str) -> StoredAnswer | None:
        return self._parse(request_id, await self._run(scripts.READ, request_id))

    async def claim(self, request_id: str, *, fingerprint: str) -> StoredAnswer | None:
        found = self._parse(request_id, await self._run(scripts.CLAIM, request_id, self._lease_ms, fingerprint))
        if found is None:
            return None
        if found.request.fingerprint != fingerprint:
            raise model_mismatch(request_id, stored=found.request.fingerprint, served=fingerprint)
        return replace(found, is_ours=True)

    def _parse(self, request_id: str, found: Sequence[Any]) -> StoredAnswer | None:
        """Parses the return value of READ or CLAIM. Returns None if there is no request."""
        if not found:
            return None
        fields, spans = found
        owner, fingerprint, window, start, request, aborted, numerics = fields
        stored = StoredRequest(
            request_id=request_id,
            fingerprint=fingerprint.decode(),
            resume_window_seconds=int(window) / 1e3,
            start_position=int(start),
            request=request,
            numerics=(numerics or b"").decode(),
        )
        tokens = TokenLog(stored.start_position)
        for packed in spans:
            tokens.add(*_unpack(packed))
        return StoredAnswer(
            request=stored,
            token_ids=tokens.token_ids(),
            is_ours=owner == self._owner,
            is_aborted=aborted is not None,
        )

    async def request_abort(self, request_id: str) -> bool:
        return bool(await self._run(scripts.REQUEST_ABORT, request_id))

    async def _run(self, script: str, request_id: str, *arguments: str | bytes | int) -> Any:
        """Runs a script for one request. Raises: StoreError."""
        keys = _keys(request_id)
        async with self._answering():
            return await self._server.eval(script, len(keys), *keys, self._owner, *arguments)

    async def _run_many(self, script: str, calls: Sequence[tuple[str, Sequence[str | bytes | int]]]) -> list[Any]:
        """Runs a script for many (request, arguments) in one round trip. See `_run_pipeline`."""
        return await self._run_pipeline(
            script, [(_keys(request_id), (self._owner, *arguments)) for request_id, arguments in calls]
        )


def _keys(request_id: str) -> tuple[str, str]:
    """Returns the keys of the request and of its tokens.

    A Valkey cluster hashes only the part in braces, so both keys share a slot. The "r:" ensures that this part is not
    empty, whatever the id begins with.
    """
    prefix = f"outrider:{{r:{request_id}}}"
    return f"{prefix}:request", f"{prefix}:tokens"


def _append_arguments(span: TokenSpan) -> tuple[int, int, int, bytes]:
    packed = struct.pack(f"<{len(span.token_ids)}I", *span.token_ids)
    return span.sample, span.start_position, span.end_position, packed


def _unpack(packed: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Returns sample, start position and token ids of one entry."""
    sample, start_position, *token_ids = struct.unpack(f"<{len(packed) // 4}I", packed)
    return sample, start_position, tuple(token_ids)


def _milliseconds(seconds: float) -> int:
    """Returns the time in whole milliseconds, at least 1, because a server refuses an expiry of 0."""
    return max(round(seconds * 1e3), 1)
