"""Encodes text and decodes tokens of the served checkpoint, in threads with a fair queue. Does not import torch."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import tokenizers

from outrider.errors import CapacityError, InvalidRequestError, ModelError, NotSupportedError
from outrider.model_hub.checkpoint_text import CheckpointText
from outrider.token_bytes import TokenBytes
from router.text.answer_text import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.text.chat_template import ChatTemplate

T = TypeVar("T")

BYTES_PER_TOKEN = 4
"""Number of bytes for which each token to be decoded counts in the queue."""
MAX_PIECES = 1024  # of a blended prompt
MAX_WAITING_BYTES = 32 << 20
"""Maximum bytes of all waiting texts, which two threads encode in about ten seconds."""
MAX_CLIENT_BYTES = 8 << 20
"""Maximum bytes of one client's waiting texts, enough for four of the largest requests."""
NEW_CLIENT_FACTOR = 4
"""A client without waiting texts is served while all waiting texts have less than this multiple of `MAX_WAITING_BYTES`.

There is a limit because client names are unverified, so that one client can pose as many new ones.
"""
RETRY_SECONDS = 1.0
"""Seconds after which a refused client should retry."""


class EncodingQueue:
    """A bounded queue of texts for the tokenizer's threads, fair between clients. Owned by the event loop.

    A client has at most as many texts in the thread pool's own queue as there are threads.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_client_bytes: int = MAX_CLIENT_BYTES,
        busy_reason: str = "TOKENIZER_BUSY",
    ) -> None:
        """`busy_reason`: the reason of the CapacityError if the queue is full."""
        self._num_threads = num_threads
        self._max_waiting_bytes = max_waiting_bytes
        self._max_client_bytes = max_client_bytes
        self._busy_reason = busy_reason
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client
        self._num_bytes: Counter[str] = Counter()  # by client: bytes of texts that wait or are being encoded

    async def run(self, work: Callable[[], T], *, client: str, num_bytes: int) -> T:
        """Calls `work` in a thread when it is the client's turn, and returns its result. Can be cancelled.

        Raises: CapacityError at once if the queue is full.
        """
        self._check(client, num_bytes)
        turn = self._turns.setdefault(client, asyncio.Semaphore(self._num_threads))
        self._num_bytes[client] += num_bytes
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_bytes[client] -= num_bytes
            if not self._num_bytes[client]:
                del self._num_bytes[client]

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, client: str, num_bytes: int) -> None:
        """Checks the limits. Any text fits into an empty queue. Raises: CapacityError."""
        of_client, total = self._num_bytes[client], self._num_bytes.total()
        limit = self._max_waiting_bytes * (1 if of_client else NEW_CLIENT_FACTOR)
        is_over = (of_client and of_client + num_bytes > self._max_client_bytes) or total + num_bytes > limit
        if is_over and total:
            raise CapacityError(
                f"queue is full: {of_client} bytes of this client wait, {total} of all clients",
                retry_after_seconds=RETRY_SECONDS,
                reason=self._busy_reason,
            )


class EncodedPrompt(NamedTuple):
    """A prompt's tokens. A separator ends each piece; it is not encoded, and pieces and the rest are encoded alone."""

    token_ids: list[int]
    piece_lengths: tuple[int, ...] = ()  # in tokens, of the pieces that have some


class Tokenizer:
    """The served model's tokenizer.

    It encodes and decodes whole texts in threads, where the library releases the interpreter
    lock. A `detokenizer` is fast enough for the event loop.
    """

    def __init__(self, text: CheckpointText, *, num_threads: int = 2) -> None:
        """Raises: ModelError if the files are not a tokenizer. Takes about 0.2 s, so call it in a thread."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(text.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(text.chat_templates, text.special_tokens)
        self._token_bytes: TokenBytes | None = None  # None: the `tokenizers` library decodes
        with suppress(NotSupportedError):
            self._token_bytes = TokenBytes.of(self._tokenizer)
        self._parts: dict[bool, list[bytes]] = {}  # tokens as bytes, by `skip_special_tokens`; empty: not byte-level
        self._longest_token = 0  # in bytes; 0: unknown
        if self._token_bytes is not None and self._token_bytes.is_byte_level:
            parts, special = self._token_bytes.of_id, self._token_bytes.special_ids
            visible = [b"" if token_id in special else part for token_id, part in enumerate(parts)]
            self._parts = {False: parts, True: visible}
            if _keeps_every_character(json.loads(text.tokenizer_json)):
                self._longest_token = max(map(len, parts), default=0)
        self._queue = EncodingQueue(num_threads)

    async def encode_text(
        self, text: str, *, separator: str = "", client: str = "", max_tokens: int | None = None
    ) -> EncodedPrompt:
        """Returns the text's token ids, with the special tokens that the tokenizer itself adds.

        Special tokens written in the text are encoded as special tokens. `separator`: see EncodedPrompt.

        Raises: InvalidRequestError, before encoding, if the text is certain to have more than `max_tokens`;
        CapacityError if the queue is full.
        """
        self._check_length(text, max_tokens, field="text")
        return await self._queue.run(
            lambda: self._encode_pieces(text, separator, add_special_tokens=True), client=client, num_bytes=len(text)
        )

    async def encode_chat(
        self,
        render: Callable[[ChatTemplate], str],
        *,
        separator: str = "",
        num_bytes: int = 0,
        client: str = "",
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Returns the token ids of the rendered chat template, without any added special tokens.

        `render` is called in a thread. `separator`: see EncodedPrompt. `num_bytes`: the approximate size of its input.

        Raises: InvalidRequestError if the model has no template or the template refuses the messages; the errors of
        `encode_text`.
        """

        def encode() -> EncodedPrompt:
            text = render(self._template)
            self._check_length(text, max_tokens, field="chat.messages")
            return self._encode_pieces(text, separator)

        return await self._queue.run(encode, client=client, num_bytes=num_bytes)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, client: str = "") -> str:
        """Returns the text of these tokens. Raises: CapacityError if the queue is full."""
        return await self._queue.run(
            lambda: self.decode_now(token_ids, skip_special_tokens=skip_special_tokens),
            client=client,
            num_bytes=BYTES_PER_TOKEN * len(token_ids),
        )

    def encode_now(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encodes in the caller's thread. The event loop may call it only for a few words."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _encode_pieces(self, text: str, separator: str, *, add_special_tokens: bool = False) -> EncodedPrompt:
        if not separator or separator not in text:
            return EncodedPrompt(self.encode_now(text, add_special_tokens=add_special_tokens))
        if text.count(separator) > MAX_PIECES:
            message = f"the separator may end at most {MAX_PIECES} pieces"
            raise InvalidRequestError(message, field="blend.separator")
        encoded = [self.encode_now(part) for part in text.split(separator)]
        if add_special_tokens:
            before, after = self.special_tokens_around()
            encoded[0], encoded[-1] = before + encoded[0], encoded[-1] + after
        return EncodedPrompt([*chain(*encoded)], tuple(len(piece) for piece in encoded[:-1] if piece))

    def decode_now(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decodes in the caller's thread. The event loop may call it only for a few tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def special_tokens_around(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens that `encode_text` adds to every text: (those before it, those after it)."""
        text, whole = (self.encode_now("a", add_special_tokens=adds) for adds in (False, True))
        start = next(start for start in range(len(whole) + 1) if whole[start : start + len(text)] == text)
        return whole[:start], whole[start + len(text) :]

    def detokenizer(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a detokenizer for one sample. `context`: the tokens before the sample."""
        if self._parts:
            return ByteDetokenizer(self._parts[skip_special_tokens])
        return WindowDetokenizer(
            lambda token_ids: self.decode_now(token_ids, skip_special_tokens=skip_special_tokens), context
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token, special or not, adds to a text. Thread-safe."""
        if self._token_bytes is not None:
            table = self._token_bytes.of_id
            return table[token_id] if token_id < len(table) else b""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else token.encode()

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special or not, with U+FFFD for parts of characters. Thread-safe."""
        return self.token_bytes(token_id).decode(errors="replace")

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._queue.close()

    def _check_length(self, text: str, max_tokens: int | None, *, field: str) -> None:
        min_tokens = len(text) // self._longest_token if self._longest_token else 0
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidRequestError(
                f"the text has at least {min_tokens} tokens, which exceeds the window of {max_tokens}",
                field=field,
                reason="PROMPT_TOO_LONG",
            )


def _keeps_every_character(description: dict[str, Any]) -> bool:
    """Returns whether no part of a text can vanish before it is encoded."""
    strips = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens", ()))
    removes = '"Removed"' in json.dumps(description.get("pre_tokenizer"))
    return description.get("normalizer") is None and not strips and not removes
