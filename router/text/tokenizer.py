"""Text to token ids and back, as the served checkpoint says. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tokenizers

from outrider.errors import InvalidRequestError, ModelError, NotSupportedError
from outrider.model_hub.checkpoint_text import CheckpointText
from outrider.token_bytes import TokenBytes
from router.text.answer_text import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.text.chat_template import ChatTemplate
from router.text.encoding_queue import EncodingQueue

BYTES_PER_TOKEN = 4
"""What a token counts as, among texts that wait to be encoded."""


class Tokenizer:
    """The served model's tokenizer.

    Encoding and whole decodings run in threads of their own, off the event loop (the
    library releases the interpreter meanwhile); `detokenizer` is for the loop.
    """

    def __init__(self, text: CheckpointText, *, num_threads: int = 2) -> None:
        """Raises: ModelError for files that are not a tokenizer. Takes about 0.2 s: call it in a thread."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(text.tokenizer_json)
            description = json.loads(text.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(text.chat_templates, text.special_tokens)
        self._token_bytes: TokenBytes | None = None  # None: the library decodes
        with suppress(NotSupportedError):
            self._token_bytes = TokenBytes.of(self._tokenizer)
        self._parts: dict[bool, list[bytes]] = {}  # of a byte-level tokenizer, by whether special tokens are skipped
        self._longest_token = 0  # in bytes; 0: not known
        if self._token_bytes is not None and self._token_bytes.is_byte_level:
            parts, special = self._token_bytes.of_id, self._token_bytes.special_ids
            spoken = [b"" if token_id in special else part for token_id, part in enumerate(parts)]
            self._parts = {False: parts, True: spoken}
            if _keeps_every_character(description):
                self._longest_token = max(map(len, parts), default=0)
        self._queue = EncodingQueue(num_threads)

    async def encode_text(self, text: str, *, client: str = "", max_tokens: int | None = None) -> list[int]:
        """With the special tokens that the tokenizer itself adds; special tokens written in the text count as such.

        Raises: InvalidRequestError for a text that has more than `max_tokens` for certain, before it is encoded;
        CapacityError when too many texts wait.
        """
        self._check_length(text, max_tokens, field="text")
        return await self._queue.run(
            lambda: self.encode_now(text, add_special_tokens=True), client=client, num_bytes=len(text)
        )

    async def encode_chat(
        self,
        render: Callable[[ChatTemplate], str],
        *,
        num_bytes: int = 0,
        client: str = "",
        max_tokens: int | None = None,
    ) -> list[int]:
        """The chat template's rendering, nothing added. `render` is called in the thread, for about `num_bytes`.

        Raises: InvalidRequestError when the model has no template or its template refuses the messages, and as
        `encode_text`; CapacityError when too many texts wait.
        """

        def encode() -> list[int]:
            text = render(self._template)
            self._check_length(text, max_tokens, field="chat.messages")
            return self.encode_now(text)

        return await self._queue.run(encode, client=client, num_bytes=num_bytes)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, client: str = "") -> str:
        """Raises: CapacityError when too many texts wait."""
        return await self._queue.run(
            lambda: self.decode_now(token_ids, skip_special_tokens=skip_special_tokens),
            client=client,
            num_bytes=BYTES_PER_TOKEN * len(token_ids),
        )

    def encode_now(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """In the caller's thread: on the event loop only a few words."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode_now(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """In the caller's thread: on the event loop only a few tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def added_around(self) -> tuple[list[int], list[int]]:
        """(the tokens before a text, those behind it) that `encode_text` adds: the same around every text."""
        text, whole = (self.encode_now("a", add_special_tokens=adds) for adds in (False, True))
        start = next(start for start in range(len(whole) + 1) if whole[start : start + len(text)] == text)
        return whole[:start], whole[start + len(text) :]

    def detokenizer(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """A decoder for one sample. `context`: the tokens before it."""
        if self._parts:
            return ByteDetokenizer(self._parts[skip_special_tokens])
        return WindowDetokenizer(
            lambda token_ids: self.decode_now(token_ids, skip_special_tokens=skip_special_tokens), context
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, special or not. May be asked by any thread."""
        if self._token_bytes is not None:
            table = self._token_bytes.of_id
            return table[token_id] if token_id < len(table) else b""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else token.encode()

    def token_text(self, token_id: int) -> str:
        """One token's text alone, special or not; parts of characters are U+FFFD. May be asked by any thread."""
        return self.token_bytes(token_id).decode(errors="replace")

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        self._queue.close()

    def _check_length(self, text: str, max_tokens: int | None, *, field: str) -> None:
        least = len(text) // self._longest_token if self._longest_token else 0
        if max_tokens is not None and least > max_tokens:
            raise InvalidRequestError(
                f"the text has at least {least} tokens; the window is {max_tokens}",
                field=field,
                reason="PROMPT_TOO_LONG",
            )


def _keeps_every_character(description: dict[str, Any]) -> bool:
    """Whether no part of a text can vanish before it is encoded."""
    strips = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens", ()))
    removes = '"Removed"' in json.dumps(description.get("pre_tokenizer"))
    return description.get("normalizer") is None and not strips and not removes
