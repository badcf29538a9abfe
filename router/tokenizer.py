"""Text to token ids and back, with the files that the nodes serve. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from outrider.errors import InvalidRequestError, ModelError
from router.chat_template import ChatTemplate, load_chat_template
from router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.encoding_queue import EncodingQueue

BYTES_PER_TOKEN = 4
"""What a token counts as, among texts that wait to be encoded."""


class Tokenizer:
    """The served model's tokenizer.

    Encoding and whole decodings run in threads of their own, off the event loop (the
    library releases the interpreter meanwhile); `detokenizer` is for the loop.
    """

    def __init__(self, files: Mapping[str, bytes], *, num_threads: int = 2) -> None:
        """Raises: ModelError for files that are not a tokenizer. Takes about 0.2 s: call it in a thread."""
        if "tokenizer.json" not in files:
            raise ModelError("the node's tokenizer has no tokenizer.json", reason="NO_TOKENIZER")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            description = json.loads(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template: ChatTemplate | None = load_chat_template(files)
        self._is_byte_level = _is_byte_level(description.get("decoder"))
        self._token_bytes: dict[bool, list[bytes]] = {}  # by whether special tokens are skipped
        self._longest_token = 0  # in bytes; 0: not known
        if self._is_byte_level:
            self._token_bytes = {
                skip: _token_bytes(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)
            }
            if _keeps_every_character(description):
                self._longest_token = max(map(len, self._token_bytes[False]), default=0)
        self._queue = EncodingQueue(num_threads)

    async def encode_text(self, text: str, *, client: str = "", max_tokens: int | None = None) -> list[int]:
        """With the special tokens that the tokenizer itself adds; special tokens written in the text count as such.

        Raises: InvalidRequestError for a text that has more than `max_tokens` for certain, before it is encoded;
        CapacityError when too many texts wait.
        """
        self._check_length(text, max_tokens, field="text")
        return await self._queue.run(
            lambda: self._encode(text, add_special_tokens=True), client=client, num_bytes=len(text)
        )

    async def encode_chat(
        self,
        messages: Iterable[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        num_bytes: int = 0,
        client: str = "",
        max_tokens: int | None = None,
    ) -> list[int]:
        """The chat template's rendering, nothing added. `messages`, of about `num_bytes`, are read in the thread.

        Raises: InvalidRequestError when the model has no template or its template refuses the messages, and as
        `encode_text`; CapacityError when too many texts wait.
        """
        template = self._template
        if template is None:
            raise InvalidRequestError("the model has no chat template; send text", field="chat", reason="CHAT_TEMPLATE")

        def encode() -> list[int]:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            self._check_length(text, max_tokens, field="chat.messages")
            return self._encode(text, add_special_tokens=False)

        return await self._queue.run(encode, client=client, num_bytes=num_bytes)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, client: str = "") -> str:
        """Raises: CapacityError when too many texts wait."""
        return await self._queue.run(
            lambda: self._decode(token_ids, skip_special_tokens=skip_special_tokens),
            client=client,
            num_bytes=BYTES_PER_TOKEN * len(token_ids),
        )

    def encode_now(self, text: str) -> list[int]:
        """A few words, nothing added, on the event loop."""
        return self._encode(text, add_special_tokens=False)

    def added_around(self) -> tuple[list[int], list[int]]:
        """(the tokens before a text, those behind it) that `encode_text` adds: the same around every text."""
        text, whole = (self._encode("a", add_special_tokens=adds) for adds in (False, True))
        start = next(start for start in range(len(whole) + 1) if whole[start : start + len(text)] == text)
        return whole[:start], whole[start + len(text) :]

    def decode_now(self, token_ids: Sequence[int]) -> str:
        """A few tokens, special or not, on the event loop."""
        return self._decode(token_ids, skip_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """A decoder for one sample. `context`: the tokens before it."""
        if self._is_byte_level:
            return ByteDetokenizer(self._token_bytes[skip_special_tokens])
        return WindowDetokenizer(
            lambda token_ids: self._decode(token_ids, skip_special_tokens=skip_special_tokens), context
        )

    def token_text(self, token_id: int) -> str:
        """One token's text alone, special or not; parts of characters are U+FFFD. May be asked by any thread."""
        if self._is_byte_level:
            table = self._token_bytes[False]
            return table[token_id].decode(errors="replace") if token_id < len(table) else ""
        token = self._tokenizer.id_to_token(token_id)
        return "" if token is None else token.replace("\u2581", " ")  # as which SentencePiece writes spaces

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

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _is_byte_level(decoder: Any) -> bool:
    """Whether decoding is nothing but GPT-2's bytes-as-characters alphabet."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder.get("type") == "ByteLevel"


def _keeps_every_character(description: dict[str, Any]) -> bool:
    """Whether no part of a text can vanish before it is encoded."""
    strips = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens", ()))
    removes = '"Removed"' in json.dumps(description.get("pre_tokenizer"))
    return description.get("normalizer") is None and not strips and not removes


def _token_bytes(tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> list[bytes]:
    """What each id adds to the text, as ByteLevel's decoder has it: ids without a token add nothing."""
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    by_id |= {token_id: token.content for token_id, token in added.items()}
    table = [b""] * (max(by_id, default=-1) + 1)
    byte_of = _byte_alphabet()
    for token_id, token in by_id.items():
        if skip_special_tokens and token_id in added and added[token_id].special:
            continue
        try:
            table[token_id] = bytes([byte_of[character] for character in token])
        except KeyError:  # an added token, in plain text
            table[token_id] = token.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, turned around."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet
