"""A decode node whose target model is a scripted answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from outrider.node import ModelInfo, NodeLoad, NodeRole
from outrider.request import FinishReason, TokenLogprobs
from outrider.session import (
    CancelSequenceGroup,
    Granted,
    KvFailed,
    KvReady,
    OpenSequenceGroup,
    PromptLogprobs,
    Rejected,
    RejectReason,
    RetargetSequenceGroup,
    SampleDone,
    SampleTokens,
    SequenceGroupEvent,
    SequenceGroupFailed,
    SpeculationCounts,
)
from outrider.v1 import session_pb2, session_pb2_grpc
from outrider.wire.answer import pack_logprobs
from outrider.wire.node import ReportWriter
from outrider.wire.session import command_from_proto, report_message_to_proto
from tests.support.router_fakes.node import Context, FakeNode

BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 64
FAKE_TRANSFER_SECONDS = 0.001
UNAVAILABLE = 14

Script = Callable[[OpenSequenceGroup, int], Sequence[int]]
"""Returns the whole answer of a sample, including the tokens of earlier attempts."""


def letters(opened: OpenSequenceGroup, sample: int) -> Sequence[int]:
    """Returns the default answer: lower-case letters that depend on seed, sample, position and adapter."""
    adapter = opened.options.adapter
    start = opened.options.sampling.seed % 26 + sample + (0 if adapter is None else 1 + int(adapter.fingerprint, 16))
    return [97 + (start + 7 * place) % 26 for place in range(opened.options.sampling.max_tokens)]


def fake_logprobs(token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Returns logprobs that are a function of each token."""
    top = tuple((place, -1.0 - place) for place in range(num_top))
    return tuple(TokenLogprobs(token_id, -token_id / 8, 1 + token_id, top) for token_id in token_ids)


@dataclass(slots=True, eq=False)
class FakeGroup:
    """One sequence group on a fake decode node."""

    opened: OpenSequenceGroup
    transfer_id: bytes  # the awaited transfer; empty if there is none
    num_blocks: int
    tokens: dict[int, Sequence[int]]  # each running sample's whole answer
    num_sent: dict[int, int]  # by running sample
    is_ready: bool = False


@dataclass(slots=True, eq=False)
class _FakeSession:
    groups: dict[bytes, FakeGroup] = field(default_factory=dict)
    events: list[SequenceGroupEvent] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, event: SequenceGroupEvent) -> None:
        self.events.append(event)
        self.wake.set()


_started: dict[str, FakeDecodeNode] = {}  # the newest node of each address


def find_decode_node(address: str) -> FakeDecodeNode | None:
    return _started.get(address)


class FakeDecodeNode(FakeNode, session_pb2_grpc.DecodeServiceServicer):
    """A fake decode node. Attributes that change while it runs apply from the next message or step on."""

    def __init__(self, *, name: str = "decode-0", model: ModelInfo | None = None, script: Script = letters) -> None:
        super().__init__(NodeRole.DECODE, name=name, model=model)
        self.script = script
        self.tokens_per_step = 1
        self.step_seconds = 0.0
        self.num_blocks = 1024
        self.max_running = 64
        self.max_local_prefill_tokens = 0  # in addition to the last prompt token
        self.held_prefix_length = 0
        self.answers_opens = True
        self.fails_opens = False  # True if it accepts each group and then aborts it at once
        self.rejected_draft_token_ids: tuple[int, ...] = ()  # of each step
        self.num_accepted_per_step: int | None = None  # None if nothing is drafted
        self.opened: list[OpenSequenceGroup] = []  # every Open, in order
        self.retargeted: list[RetargetSequenceGroup] = []
        self.cancelled: list[CancelSequenceGroup] = []
        self._sessions: set[_FakeSession] = set()

    @property
    def groups(self) -> list[FakeGroup]:
        return [group for session in self._sessions for group in session.groups.values()]

    @property
    def max_sent(self) -> int:
        """The largest number of tokens that a running sample was sent."""
        return max((num for group in self.groups for num in group.num_sent.values()), default=0)

    @property
    def num_blocks_used(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def start(self, address: str = "127.0.0.1:0") -> str:
        _started[await super().start(address)] = self
        return self.address

    def add_to(self, server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def load(self) -> NodeLoad:
        num_running = sum(len(group.tokens) for group in self.groups)
        return NodeLoad(
            num_running=num_running,
            num_sequences_free=max(self.max_running - num_running, 0),
            kv_blocks_total=self.num_blocks,
            kv_blocks_free=self.num_blocks - self.num_blocks_used,
        )

    def complete_transfer(self, transfer_id: bytes, num_tokens: int) -> bool:
        """Handles a committed push of the prefill node. Returns False if no group waits for it."""
        return self._end_transfer(
            transfer_id, lambda session, group: self._make_ready(session, group, num_tokens * KV_BYTES_PER_TOKEN)
        )

    def fail_transfer(self, transfer_id: bytes, message: str = "scripted failure") -> bool:
        """Handles a failed transfer, whose group waits for another. Returns False if no group waits for it."""

        def fail(session: _FakeSession, group: FakeGroup) -> None:
            group.transfer_id = b""
            session.say(
                KvFailed(sequence_group_id=group.opened.sequence_group_id, transfer_id=transfer_id, message=message)
            )

        return self._end_transfer(transfer_id, fail)

    def _end_transfer(self, transfer_id: bytes, end: Callable[[_FakeSession, FakeGroup], None]) -> bool:
        for session in self._sessions:
            for group in session.groups.values():
                if group.transfer_id == transfer_id:
                    end(session, group)
                    return True
        return False

    def fail_groups(self, *, code: int = UNAVAILABLE) -> None:
        """Aborts every group."""
        for session in self._sessions:
            for group_id in list(session.groups):
                self._give_up(session, group_id, code)

    def _give_up(self, session: _FakeSession, group_id: bytes, code: int) -> None:
        session.groups.pop(group_id, None)
        session.say(SequenceGroupFailed(sequence_group_id=group_id, code=code, message="scripted failure"))

    async def break_sessions(self) -> None:
        """Ends every session, as a broken network would. The node lives on."""
        for session in self._sessions:
            session.groups.clear()
            session.wake.set()
        self._sessions.clear()

    async def Session(
        self, requests: AsyncIterator[session_pb2.SessionCommand], context: Context
    ) -> AsyncIterator[session_pb2.SessionReport]:
        hello = (await anext(aiter(requests))).hello
        if hello.fingerprint != self.model.fingerprint:
            message = f"{self.name} serves {self.model.fingerprint}, {hello.name} {hello.fingerprint}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        session = _FakeSession()
        self._sessions.add(session)
        reader = asyncio.ensure_future(self._read(requests, session))
        try:
            yield report_message_to_proto(ReportWriter().to_proto(self.report()), (), hello=self.info())
            while session in self._sessions and not reader.done():
                await self._wait_for_work(session)
                await self.moves()
                self._step(session)
                events, session.events = session.events, []
                yield report_message_to_proto(ReportWriter().to_proto(self.report()), events)
        finally:
            reader.cancel()
            session.groups.clear()
            self._sessions.discard(session)

    async def _wait_for_work(self, session: _FakeSession) -> None:
        if any(group.is_ready for group in session.groups.values()):
            await asyncio.sleep(self.step_seconds)
            return
        session.wake.clear()
        if not session.events:
            try:
                async with asyncio.timeout(0.05):
                    await session.wake.wait()
            except TimeoutError:
                return

    async def _read(self, requests: AsyncIterator[session_pb2.SessionCommand], session: _FakeSession) -> None:
        async for proto in requests:
            await self.moves()
            if proto.WhichOneof("command") == "heartbeat":
                continue
            command = command_from_proto(proto)
            match command:
                case OpenSequenceGroup():
                    self.opened.append(command)
                    if self.fails_opens:
                        self._give_up(session, command.sequence_group_id, UNAVAILABLE)
                    elif self.answers_opens:
                        self._open(session, command)
                case RetargetSequenceGroup():
                    self.retargeted.append(command)
                    self._retarget(session, command)
                case CancelSequenceGroup():
                    self.cancelled.append(command)
                    self._cancel(session, command)
            session.wake.set()

    def _open(self, session: _FakeSession, opened: OpenSequenceGroup) -> None:
        num_samples = len(opened.samples)
        group_id = opened.sequence_group_id
        num_blocks = -(-len(opened.shared_token_ids()) // BLOCK_TOKENS) + num_samples
        load = self.load()
        adapter = opened.options.adapter
        if adapter is not None and self.adapters.find(adapter) is None:
            session.say(
                Rejected(sequence_group_id=group_id, reason=RejectReason.NO_ADAPTER, message=f"no adapter {adapter}")
            )
            return
        if num_blocks > self.num_blocks:
            session.say(
                Rejected(sequence_group_id=group_id, reason=RejectReason.TOO_LARGE, message="more than the whole pool")
            )
            return
        if num_blocks > load.kv_blocks_free or load.num_running + num_samples > self.max_running:
            session.say(
                Rejected(
                    sequence_group_id=group_id,
                    reason=RejectReason.NO_ROOM,
                    message="no room",
                    kv_blocks_needed=num_blocks,
                    num_sequences_needed=num_samples,
                )
            )
            return
        group = FakeGroup(
            opened=opened,
            transfer_id=opened.transfer_id,
            num_blocks=num_blocks,
            tokens={start.sample: self.script(opened, start.sample) for start in opened.samples},
            num_sent={start.sample: len(start.generated_token_ids) for start in opened.samples},
        )
        session.groups[group_id] = group
        num_missing = len(opened.shared_token_ids()) - self._num_held(opened)
        is_local = num_missing <= self.max_local_prefill_tokens or not opened.transfer_id
        self._grant(session, group, is_local=is_local)

    def _retarget(self, session: _FakeSession, command: RetargetSequenceGroup) -> None:
        group = session.groups.get(command.sequence_group_id)
        if group is not None and not group.is_ready:
            group.transfer_id = command.transfer_id
            self._grant(session, group, is_local=not command.transfer_id)

    def _num_held(self, opened: OpenSequenceGroup) -> int:
        return min(self.held_prefix_length, len(opened.shared_token_ids()))

    def _grant(self, session: _FakeSession, group: FakeGroup, *, is_local: bool) -> None:
        opened, held = group.opened, self._num_held(group.opened)
        num_known = len(opened.known_token_ids(opened.samples[0]))
        session.say(
            Granted(
                sequence_group_id=opened.sequence_group_id,
                transfer_id=group.transfer_id,
                kv_address="" if is_local else self.address,
                held_prefix_length=held,
                num_tokens_to_compute=num_known - (held if is_local else len(opened.shared_token_ids())),
            )
        )
        if is_local:
            group.transfer_id = b""
            group.is_ready = True
            if opened.options.prompt_logprobs is not None:
                for packed in self.prompt_logprobs(opened):
                    session.say(PromptLogprobs(sequence_group_id=opened.sequence_group_id, packed=packed))

    def _make_ready(self, session: _FakeSession, group: FakeGroup, num_bytes: int) -> None:
        session.say(
            KvReady(
                sequence_group_id=group.opened.sequence_group_id,
                transfer_id=group.transfer_id,
                connector="fake",
                kv_bytes=num_bytes,
                transfer_seconds=FAKE_TRANSFER_SECONDS,
            )
        )
        group.transfer_id = b""
        group.is_ready = True

    def _cancel(self, session: _FakeSession, command: CancelSequenceGroup) -> None:
        group = session.groups.get(command.sequence_group_id)
        if group is None:
            return
        for sample in command.samples or list(group.tokens):
            group.tokens.pop(sample, None)
        if not group.tokens:
            del session.groups[command.sequence_group_id]

    def _step(self, session: _FakeSession) -> None:
        """Performs one step: sends the next tokens of every running sample."""
        ready = [group for group in session.groups.values() if group.is_ready]
        self.step += bool(ready)
        for group in ready:
            for sample in list(group.tokens):
                self._advance(session, group, sample)
            if not group.tokens:
                del session.groups[group.opened.sequence_group_id]

    def _advance(self, session: _FakeSession, group: FakeGroup, sample: int) -> None:
        opened, sent = group.opened, group.num_sent[sample]
        end: tuple[FinishReason, int | None] | None = None
        token_ids: list[int] = []
        for token_id in group.tokens[sample][sent : sent + self.tokens_per_step]:
            token_ids.append(token_id)
            num_generated = sent + len(token_ids)
            if token_id in opened.options.stop_token_ids and num_generated > opened.options.sampling.min_tokens:
                end = (FinishReason.STOP, token_id)
            elif num_generated >= opened.options.sampling.max_tokens:
                end = (FinishReason.LENGTH, None)
            if end is not None:
                break
        group.num_sent[sample] = sent + len(token_ids)
        if token_ids:
            session.say(
                SampleTokens(
                    sequence_group_id=opened.sequence_group_id,
                    sample=sample,
                    start_position=len(opened.prompt_token_ids) + sent,
                    token_ids=tuple(token_ids),
                    logprobs=self._logprobs(opened, token_ids),
                    speculation=self._speculation(),
                    rejected_draft_token_ids=self.rejected_draft_token_ids,
                )
            )
        if end is not None:
            del group.tokens[sample]
            done = SampleDone(
                sequence_group_id=opened.sequence_group_id, sample=sample, reason=end[0], stop_token_id=end[1]
            )
            session.say(done)

    def prompt_logprobs(self, opened: OpenSequenceGroup) -> list[bytes]:
        """Returns the prompt's logprobs in pieces of two tokens."""
        token_ids, num_top = opened.prompt_token_ids[1:], opened.options.prompt_logprobs or 0
        return [
            pack_logprobs(fake_logprobs(token_ids[place : place + 2], num_top)) for place in range(0, len(token_ids), 2)
        ]

    def _logprobs(self, opened: OpenSequenceGroup, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if opened.options.logprobs is None:
            return ()
        return fake_logprobs(token_ids, opened.options.logprobs.num_top)

    def _speculation(self) -> SpeculationCounts:
        accepted = self.num_accepted_per_step
        if accepted is None:
            return SpeculationCounts()
        return SpeculationCounts(
            num_spec_steps=1,
            num_draft_tokens=4,
            num_accepted_draft_tokens=accepted,
            acceptance_histogram=(*(0 for _ in range(accepted)), 1),
            num_wanting_steps=1,
            num_hit_steps=1,
        )
