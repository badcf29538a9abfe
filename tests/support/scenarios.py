"""Text scenarios of one request: events go in, the machine's state and instructions come out. No nodes, no clock.

A line is a comment (`#`), an event, or, after `>`, the machine's response. `Scenario.play` writes the responses;
`tests.support.request_ledger` checks after each event that nothing is held twice, lost or forgotten, and at the end
of the scenario that everything is released. The events:

    request [n=2] [prompt=4] [max_tokens=9] [window=30] [method=rejection] [stop=text] [prompt_logprobs] [known=3]
            [encoding]                       known: tokens of each sample from a router that is gone
    encoded                                  ends the encoding of a request that was `encoding`
    cluster [full] [incomplete] [not_timely] changes the responses to questions about nodes: no serving node could take
                                             the request; a node that does not serve might; all nodes are late
    placed d1 [p1] [hedge] [numerics=x] [prefill_numerics=x]   decode node d1 and prefill node p1 are reserved
    not-placed [QUEUE_FULL]                  the queue rejects the request, or no node is available for a hedge
    granted 1 [local] [other]                the node grants attempt 1; local: it computes the prompt itself
    rejected 1 NO_ROOM                       or DRAINING, TOO_LARGE, NO_ADAPTER, INVALID
    kv-ready 1, kv-failed 1 [other]          other: of a transfer that was abandoned
    prefill 1 ok | lost | failed | no-adapter | logprobs=2   the prefill call ends
    prefill-late 1, prefill-chosen 1 p2 | none
    tokens 1 4..6 [sample=1] [as=90] [gap]   tokens at positions 4 and 5; a token's id is its position, or that of `as`
    done 1 [sample=0] [reason=length], logprobs 1 3, failed 1 [invalid], lost 1
    late 1, on-time 1, draining 1            the attempt's decode node changes
    wait 10                                  seconds pass; timers fire
    reader-attached, reader-left [old]       old: the call of the first reader
    read                                     shows the messages that readers have not received yet
    abort, fail DRAINING, drop [EVICTED]
    crash                                    an instruction could not be performed
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.rpc import code_pb2

from outrider.answer import Delta, Finished, Started
from outrider.errors import NO_ADAPTER, AbortedError, OutriderError, PeerLostError
from outrider.prefill import PrefillFigures
from outrider.request import (
    FinishReason,
    OutputOptions,
    Request,
    RequestOptions,
    SamplingParams,
    StopStrings,
    TokenLogprobs,
    VerificationMethod,
)
from outrider.rpc.status import UNREACHABLE
from outrider.session import (
    Granted,
    KvFailed,
    KvReady,
    PromptLogprobs,
    Rejected,
    RejectReason,
    SampleDone,
    SampleTokens,
    SequenceGroupFailed,
)
from outrider.wire.answer import pack_logprobs
from router.nodes.directory import EXACT_NUMERICS
from router.requests import events as on
from router.requests.answer import Answer, AnswerReader, DeliveryBatcher
from router.requests.machine import Request as Machine
from router.requests.states import Limits
from router.scheduling.placement import Demand
from router.text.answer_text import ByteDetokenizer
from tests.support.request_ledger import Ledger

OPEN_SECONDS, KV_SECONDS = 10.0, 10.0


class ScriptedCluster:
    """A `Cluster` whose responses the scenario sets."""

    is_full = False  # no serving node could ever take the request
    awaits_decode_nodes = False
    is_timely = True

    def is_usable(self, _demand: Demand) -> bool:
        return not self.is_full

    def has_decode_node_on_time(self, _demand: Demand) -> bool:
        return self.is_timely


class _Tokenizer:
    """A tokenizer that decodes each token to one letter."""

    def detokenizer(self, **_options: object) -> ByteDetokenizer:
        return ByteDetokenizer([b"", *(bytes([97 + token % 26]) for token in range(1, 200))])


class Scenario:
    """One scenario. `play` plays it with a new machine; `tell` feeds one more line."""

    def __init__(self, text: str = "", *, machine: type[Machine] = Machine) -> None:
        self._lines = [line for line in text.splitlines() if not line.startswith(">")]
        self._machine = machine
        self._ids = itertools.count(1)
        self._cluster = ScriptedCluster()
        self._readers: list[AnswerReader[Any]] = []
        self._node_of: dict[str, on.Node] = {}

    def play(self) -> str:
        """Returns the scenario with the machine's responses."""
        told: list[str] = []
        for line in self._lines:
            told.append(line)
            if line.strip() and not line.startswith("#"):
                told += [f"> {answer}" for answer in self.tell(line)]
        self.ledger.end()
        return "\n".join(told) + "\n"

    def tell(self, line: str) -> list[str]:
        """Returns the machine's response to one event."""
        word, *words = line.split()
        return list(self._tell(word, words))

    def _tell(self, word: str, words: list[str]) -> Iterator[str]:
        flags = {word for word in words if "=" not in word}
        options = dict(word.split("=", 1) for word in words if "=" in word)
        match word:
            case "request":
                yield from self._begin(flags, options)
            case "encoded":
                yield from self.ledger.step(on.Encoded(self._answer))
            case "cluster":
                self._cluster.is_full = "full" in flags
                self._cluster.awaits_decode_nodes = "incomplete" in flags
                self._cluster.is_timely = "not_timely" not in flags
            case "wait":
                yield from self._wait(float(words[0]))
            case "read":
                yield from self._read()
            case "crash":
                yield from self.ledger.crash()
            case _:
                yield from self.ledger.step(self._event(word, words, flags, options))

    def _begin(self, flags: set[str], options: dict[str, str]) -> Iterator[str]:
        window = options.get("window")
        limits = Limits(
            window_seconds=None if window is None else float(window),
            open_timeout_seconds=OPEN_SECONDS,
            kv_ready_timeout_seconds=KV_SECONDS,
            new_id=lambda: b"id%d" % next(self._ids),
        )
        request = Request(
            request_id="r",
            prompt_token_ids=tuple(range(int(options.get("prompt", 4)))),
            options=RequestOptions(
                sampling=SamplingParams(
                    seed=0, max_tokens=int(options.get("max_tokens", 40)), n=int(options.get("n", 1))
                ),
                verification_method=VerificationMethod(options.get("method", "coupled")),
                prompt_logprobs=0 if "prompt_logprobs" in flags else None,
            ),
            stop=StopStrings(strings=(options["stop"],) if "stop" in options else ()),
            output=OutputOptions(token_ids_only=True),
        )
        started = Started(
            request_id="r", num_prompt_tokens=len(request.prompt_token_ids), seed=0, model="m", router="r"
        )
        tokenizer: Any = _Tokenizer()
        self._answer = Answer(request, started, tokenizer=tokenizer, batcher=DeliveryBatcher())
        start = len(request.prompt_token_ids)
        for sample in range(request.options.sampling.n):
            if known := int(options.get("known", 0)):
                self._answer.take(SampleTokens(b"", sample, start, tuple(range(start, start + known))))
        self.ledger = Ledger(self._machine(limits, self._cluster), self._answer)
        if "encoding" not in flags:
            yield from self.ledger.step(on.Encoded(self._answer, was_admitted="known" in options))

    # ------------------------------------------------------------ events

    def _event(self, word: str, words: list[str], flags: set[str], options: dict[str, str]) -> on.Event:
        of_request: dict[str, Callable[[], on.Event]] = {
            "placed": lambda: self._placed(words, flags, options),
            "not-placed": lambda: self._not_placed(words),
            "reader-attached": self._attach,
            "reader-left": lambda: self._leave(flags),
            "abort": on.AbortRequested,
            "fail": lambda: on.Failed(PeerLostError("the router ends it", reason=words[0])),
            "drop": lambda: on.Dropped(AbortedError("dropped", reason=words[0]) if words else None),
        }
        if word in of_request:
            return of_request[word]()
        number, group = int(words[0]), self.ledger.group_ids[int(words[0])]
        transfer = b"old" if "other" in flags else self.ledger.transfers[number]
        sample = int(options.get("sample", 0))
        match word:
            case "granted":
                return Granted(
                    sequence_group_id=group,
                    transfer_id=transfer,
                    kv_address="" if "local" in flags else "kv:1",
                    held_prefix_length=0,
                    num_tokens_to_compute=1,
                )
            case "rejected":
                return Rejected(sequence_group_id=group, reason=RejectReason[words[1]], message="no")
            case "kv-ready":
                return KvReady(
                    sequence_group_id=group, transfer_id=transfer, connector="tcp", kv_bytes=1, transfer_seconds=0.1
                )
            case "kv-failed":
                return KvFailed(sequence_group_id=group, transfer_id=transfer, message="broken")
            case "prefill":
                self.ledger.prefills.remove(number)
                return on.PrefillEnded(group, _prefill_result(words[1], options))
            case "prefill-late":
                return on.PrefillLate(group)
            case "prefill-chosen":
                self.ledger.choosing.remove(number)
                return on.PrefillChosen(group, None if words[1] == "none" else self._node(words[1], options))
            case "tokens":
                first, end = map(int, words[1].split(".."))
                token_ids = (int(options["as"]),) * (end - first) if "as" in options else tuple(range(first, end))
                return SampleTokens(group, sample, first + ("gap" in flags), token_ids)
            case "done":
                reason = FinishReason[options.get("reason", "length").upper()]
                return SampleDone(sequence_group_id=group, sample=sample, reason=reason)
            case "logprobs":
                return PromptLogprobs(sequence_group_id=group, packed=_logprobs(int(words[1])))
            case "failed":
                code = code_pb2.INVALID_ARGUMENT if "invalid" in flags else code_pb2.INTERNAL
                return SequenceGroupFailed(sequence_group_id=group, code=code, message="gave up")
            case "lost":
                return on.SessionLost(group, PeerLostError("the session broke"))
            case "late" | "on-time" | "draining":
                return on.DecodeNodeChanged(group, is_late=word == "late", is_draining=word == "draining")
        raise ValueError(f"a scenario has no event {word!r}")

    def _placed(self, words: list[str], flags: set[str], options: dict[str, str]) -> on.Placed:
        ledger = self.ledger
        names = [word for word in words if word[0] in "dp" and "=" not in word]
        of_prefill = {"numerics": options.get("prefill_numerics", options.get("numerics", EXACT_NUMERICS))}
        prefill = next((self._node(name, of_prefill) for name in names if name[0] == "p"), None)
        place = f"place of {' and '.join(names)}"
        assert place not in ledger.places, "a place is assigned once at a time"
        ledger.places.add(place)
        if "hedge" in flags:
            assert ledger.num_hedges_wanted, "no hedge was asked for"
            ledger.num_hedges_wanted -= 1
        else:
            assert ledger.is_in_queue, "the request is not in the queue"
            ledger.is_in_queue = False
        return on.Placed(place, self._node(names[0], options), prefill, b"", is_hedge="hedge" in flags)

    def _not_placed(self, words: list[str]) -> on.NotPlaced:
        """Returns the event. The queue rejects with a reason; a search for a hedge fails without one."""
        if words:
            assert self.ledger.is_in_queue, "the request is not in the queue"
            self.ledger.is_in_queue = False
            return on.NotPlaced(PeerLostError("refused", reason=words[0]))
        assert self.ledger.num_hedges_wanted, "no hedge was asked for"
        self.ledger.num_hedges_wanted -= 1
        return on.NotPlaced()

    def _node(self, name: str, options: dict[str, str]) -> on.Node:
        numerics = options.get("numerics", EXACT_NUMERICS)
        return self._node_of.setdefault(name, on.Node(name, name.encode(), numerics))

    # ------------------------------------------------------------ clients and time

    def _attach(self) -> on.ReaderAttached:
        self._readers.append(self._answer.read(lambda event: event))
        return on.ReaderAttached()

    def _leave(self, flags: set[str]) -> on.ReaderLeft:
        if self._readers:  # else the call ended before it could read
            self._answer.leave(self._readers[0] if "old" in flags else self._readers[-1])
        return on.ReaderLeft()

    def _read(self) -> Iterator[str]:
        """Yields the new messages of all streams, including those that were superseded."""
        for index, reader in enumerate(self._readers):
            of = f"reader {index + 1}" if len(self._readers) > 1 else "reader"
            told = [_show_message(message) for message in _next(reader)]
            if told:
                yield f"{of}: {', '.join(told)}"

    def _wait(self, seconds: float) -> Iterator[str]:
        ledger = self.ledger
        end = ledger.now + seconds
        while ledger.timers and (due := min(ledger.timers.items(), key=lambda item: item[1]))[1] <= end:
            (timer, group), ledger.now = due
            del ledger.timers[timer, group]
            yield f"{ledger.now:g} s: {timer.name} fires"
            yield from ledger.step(on.TimerFired(timer, group))
        ledger.now = end


def _next(reader: AnswerReader[Any]) -> Iterator[object]:
    """Yields all messages that a reader has not received, without an event loop."""
    while True:
        try:
            reader.next().send(None)
        except StopIteration as stop:
            if not stop.value:
                return
            yield from stop.value
        except OutriderError as error:
            yield error
            return
        except RuntimeError:  # `next` would wait
            return


def _show_message(message: object) -> str:
    match message:
        case Delta(sample, position, token_ids):
            of = f"sample {sample} " if sample else ""
            return f"{of}{position}..{position + len(token_ids)}"
        case Finished(sample, reason):
            return f"{f'sample {sample} ' if sample else ''}{reason.name}"
        case OutriderError():
            return f"fails with {message.reason}"
    return type(message).__name__


def _prefill_result(word: str, options: dict[str, str]) -> PrefillFigures | PeerLostError:
    match word:
        case "lost":
            return PeerLostError("the prefill node is lost", reason=UNREACHABLE)
        case "failed":
            return PeerLostError("the prefill failed")
        case "no-adapter":
            return PeerLostError("the prefill node has no adapter", reason=NO_ADAPTER)
    return PrefillFigures(prompt_logprobs=_logprobs(int(options.get("logprobs", 0))))


def _logprobs(number: int) -> bytes:
    return pack_logprobs([TokenLogprobs(1, -1.0, 1)] * number)


def scenario_files() -> list[Path]:
    return sorted((Path(__file__).parents[1] / "router" / "scenarios").glob("*.txt"))
