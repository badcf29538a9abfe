"""A synchronous client of draft nodes, for any engine that can verify draft tokens."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from outrider.drafting.exchange import WAIT_SHARE_OF_STEP, DraftExchange
from outrider.drafting.known_texts import KnownText, KnownTexts, TokenIds
from outrider.drafting.link import DraftLink, LinkOutlets
from outrider.request import RequestOptions, SamplingParams
from outrider.rpc.tls import PLAINTEXT, PeerSecurity
from outrider.speculation.draft_stream import MAX_BRANCH_TOKENS, DraftHello, SequenceStart

MAX_WAIT_SECONDS = 0.002
"""Default of the longest wait for drafts in a call, which is also limited by `WAIT_SHARE_OF_STEP`."""

FORGET_SECONDS = 1.0
FORGET_STEPS = 4.0
"""A text has ended if no call had it for this time, and for as many of the engine's steps."""

IDLE_SECONDS = 10.0
"""Further time after which a text has ended if there was no call at all. A single step may take long."""

STOP_SECONDS = 5.0

LOGGER = logging.getLogger("outrider.drafting")


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """The state of a client's draft nodes and texts."""

    connected: tuple[str, ...]  # addresses
    refused: Mapping[str, str]  # by address: why a node does not fit, as found by the last connection
    num_texts: int


class Client:
    """Gets drafts of texts from draft nodes (docs/drafting.md). It opens its streams in a thread of its own.

    An engine calls `propose` after each of its steps, with all tokens of every sequence in its batch, and verifies in
    the next step what it gets. No ids are needed: a text that begins with an earlier call's text continues it. While
    the engine computes a step, draft nodes with a draft model already draft for what may follow, so that the next call
    often finds its drafts here.

    Drafts are advice: the tokens that a greedy drafter would choose next. Whatever a draft node does, `propose` returns
    within its wait budget and raises nothing because of it: a node that is dead, slow, restarted or hostile costs
    drafts only. A call waits only if answers have usually come within the budget. Several nodes share the texts.

    Thread-safe: any thread may call any method, and several threads may propose at a time, each for its own texts. Make
    the client after forking, since its thread stays in the process that made it. `close` it, or use `with`.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        vocabulary: str,
        vocab_size: int,
        max_model_len: int,
        name: str = "",
        max_wait_seconds: float = MAX_WAIT_SECONDS,
        security: PeerSecurity = PLAINTEXT,
        logger: logging.Logger = LOGGER,
    ) -> None:
        """Begins to connect, without waiting for connections.

        Args:
            targets: "host:port" of each draft node.
            vocabulary: the engine's vocabulary, as `vocabulary_of` its tokenizer. A node with another one is refused.
            vocab_size: number of token ids; larger ones are not drafted.
            max_model_len: maximum tokens of a text, with its prompt.
            name: this engine in the logs of draft nodes; by default host and process.
            max_wait_seconds: how long a call may wait for drafts; 0: it takes only those that have arrived.
            security: certificates for mutual TLS.
            logger: receives a message when a draft node connects, is lost or is refused.

        Raises: ConfigError if certificates cannot be read.
        """
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._max_wait_seconds = max_wait_seconds
        _ = security.material  # raises for unreadable files, here rather than in the thread
        hello = DraftHello(
            incarnation=os.urandom(16),
            name=name or f"client@{socket.gethostname()}:{os.getpid()}",
            vocab_size=vocab_size,
            vocabulary_fingerprint=vocabulary,
            max_model_len=max_model_len,
        )
        outlets = LinkOutlets(open_channel=security.open_channel, log=_StandardLog(logger))
        addresses = [targets] if isinstance(targets, str) else targets
        self._streams = _Streams(hello, outlets, addresses, on_tick=self._forget_idle)
        self._lock = threading.Lock()  # guards what follows
        self._texts = KnownTexts()
        self._sequence_ids = itertools.count(1)
        self._last_step_seconds = 0.0
        self._thread = threading.Thread(target=self._streams.run, name="outrider-drafting", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def propose(
        self, texts: Sequence[npt.ArrayLike], *, num_tokens: int, max_wait_seconds: float | None = None
    ) -> list[list[int]]:
        """Returns a draft of at most `num_tokens` tokens for each text; empty where there is none.

        A text is a sequence of token ids, prompt and generated ones; numpy arrays of 32-bit integers are fastest. It
        may grow by up to 64 tokens between two calls. `max_wait_seconds` replaces the client's own.

        Raises: OverflowError for an id outside uint32.
        """
        started = time.monotonic()
        with self._lock:
            if not any(link.is_connected for link in self._streams.links):
                self._forget_ended(math.inf)  # a node that comes back holds no text
                return [[] for _ in texts]
            arrays = [np.ascontiguousarray(text, dtype=np.uint32) for text in texts]
            known = self._recognise(arrays, num_tokens, started)
            self._forget_ended(started)
            budget = self._max_wait_seconds if max_wait_seconds is None else max_wait_seconds
            budget = min(budget, WAIT_SHARE_OF_STEP * self._last_step_seconds)
        ids = list({text.sequence_id: None for text in known if text is not None})
        trees = self._streams.take(ids, wait_seconds=budget).trees
        finished = time.monotonic()
        for text in filter(None, known):
            text.seen_at = finished
        # An equal text in the batch may have grown past this one. A draft of that length is not of this text.
        found = [
            None if text is None or text.length != len(array) else trees.get(text.sequence_id)
            for text, array in zip(known, arrays, strict=True)
        ]
        return [[] if tree is None else list(tree.token_ids[:num_tokens]) for tree in found]

    def _recognise(self, arrays: Sequence[TokenIds], num_tokens: int, now: float) -> list[KnownText | None]:
        """Records how texts have grown, and announces new ones. Returns None for texts that cannot be drafted."""
        known: list[KnownText | None] = []
        updates: list[tuple[int, list[int], int]] = []
        steps: list[float] = []
        for token_ids in arrays:
            length = len(token_ids)
            text = self._texts.find(token_ids) if 0 < length < self._max_model_len else None
            new = token_ids[0 if text is None else text.length :].tolist()
            if not 0 < length < self._max_model_len or max(new, default=0) >= self._vocab_size:
                known.append(None)
                continue
            num_wanted = min(num_tokens, self._max_model_len - length, MAX_BRANCH_TOKENS)
            if text is None:
                text = KnownText(next(self._sequence_ids), (0, 0), 0, now)
                self._streams.open(text.sequence_id, self._start(length), new, num_wanted=num_wanted)
            elif new:
                updates.append((text.sequence_id, new, num_wanted))
                steps.append(now - text.seen_at)
            if new:
                self._texts.put(text, token_ids)
            text.seen_at = now
            known.append(text)
        if updates:
            self._last_step_seconds = min(steps)
            self._streams.observe_step(self._last_step_seconds)
            self._streams.commit(updates)
        return known

    def _start(self, prompt_length: int) -> SequenceStart:
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=self._max_model_len - prompt_length)
        return SequenceStart(options=RequestOptions(sampling=sampling), sample=0, prompt_length=prompt_length)

    def _forget_ended(self, now: float) -> None:
        oldest = now - max(FORGET_SECONDS, FORGET_STEPS * self._last_step_seconds)
        for text in [text for text in self._texts if text.seen_at < oldest]:
            self._texts.remove(text)
            self._streams.close(text.sequence_id)

    def _forget_idle(self) -> None:
        """Forgets the texts of an engine that makes no calls. The streams' thread calls it every `FORGET_SECONDS`."""
        with self._lock:
            self._forget_ended(time.monotonic() - IDLE_SECONDS)

    def status(self) -> ClientStatus:
        links = self._streams.links
        with self._lock:
            num_texts = sum(1 for _ in self._texts)
        return ClientStatus(
            connected=tuple(link.address for link in links if link.is_connected),
            refused={link.address: link.refusal for link in links if link.refusal},
            num_texts=num_texts,
        )

    def close(self) -> None:
        """Ends the streams. From then on there are no drafts. A second call does nothing."""
        atexit.unregister(self.close)
        self._streams.stop()
        self._thread.join(STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Streams(DraftExchange):
    """The exchange with nodes at fixed addresses, whose event loop runs in a thread."""

    def __init__(
        self,
        hello: DraftHello,
        outlets: LinkOutlets,
        targets: Sequence[str],
        *,
        on_tick: Callable[[], None],
    ) -> None:
        super().__init__(hello, outlets)
        self._on_tick = on_tick
        self._links = [self.open_link(target) for target in targets]
        self._stopping = asyncio.Event()
        self._own_loop = asyncio.new_event_loop()

    @property
    def links(self) -> list[DraftLink]:
        return self._links

    def run(self) -> None:
        """Serves the streams until `stop`. The thread's own function."""
        with asyncio.Runner(loop_factory=lambda: self._own_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(link.run()) for link in self._links]
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), FORGET_SECONDS)
            self._on_tick()
        self._loop = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Ends `run`. Any thread may call it, at any time."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._own_loop.call_soon_threadsafe(self._stopping.set)


class _StandardLog:
    """Writes events to a logger of the standard library."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def log(self, level: int, event: str, *, exc_info: Exception | None = None, **fields: Any) -> None:
        described = ", ".join(f"{name}={value}" for name, value in fields.items())
        self._logger.log(level, "%s: %s", event, described, exc_info=exc_info)


def vocabulary_of(tokenizer_json: bytes) -> str:
    """Returns the fingerprint of the vocabulary in the contents of a tokenizer.json. Needs the package `tokenizers`.

    Raises: ModelError if the contents are not a tokenizer.
    """
    from outrider.model_hub.checkpoint_text import read_vocabulary, vocabulary_fingerprint

    return vocabulary_fingerprint(read_vocabulary(tokenizer_json))
