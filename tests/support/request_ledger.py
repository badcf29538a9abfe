"""Keeps account of a machine's instructions in place of the driver: without nodes, tasks or a clock.

`Ledger.step` feeds an event, records the instructions, and checks that nothing is held twice, lost or forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from outrider.answer import Summary
from outrider.errors import InternalError
from outrider.node import NodeRole
from outrider.session import RejectReason
from router.requests import events as on
from router.requests import instructions as do
from router.requests.answer import Answer
from router.requests.machine import Request
from router.requests.states import AttemptState, InvalidTransitionError, State
from router.scheduling.placement import Demand


class Ledger:
    """The resources that one request holds. Attempts are numbered in the order in which they were opened."""

    def __init__(self, machine: Request, answer: Answer) -> None:
        self.machine = machine
        self.answer = answer
        self.now = 0.0  # seconds
        self.is_in_queue = False
        self.num_hedges_wanted = 0  # searches for a hedge that have no result yet
        self.places: set[str] = set()  # assigned and not returned
        self.open: set[int] = set()  # attempts
        self.prefills: set[int] = set()  # attempts whose call runs
        self.group_ids: dict[int, bytes] = {}  # by attempt
        self.transfers: dict[int, bytes] = {}  # by attempt: the id of its current transfer
        self.choosing: set[int] = set()  # attempts that wait for `PrefillChosen`
        self.timers: dict[tuple[on.Timer, bytes], float] = {}
        self._numbers: dict[bytes, int] = {}  # numbers of attempts, by sequence group id
        self._place_of: dict[int, str] = {}
        self._hedges: set[int] = set()
        self._num_known = answer.num_generated_tokens
        self._num_delivered = self._num_settled = self._num_freed = 0

    def step(self, event: on.Event) -> Iterator[str]:
        """Yields the machine's response as text. An internal error ends the request, as in the driver."""
        number = self._numbers.get(getattr(event, "sequence_group_id", b""))
        was_over = number is not None and number not in self.open and number not in self.prefills
        had_ended = self.answer.has_ended
        try:
            instructions = self.machine.step(event, self.now)
        except InvalidTransitionError as error:
            yield f"InvalidTransitionError: {error.message}"
            instructions = self.machine.crash(InternalError("a bug"), self.now)
        if was_over and not isinstance(event, on.PrefillEnded):
            assert not instructions, "an attempt that has ended does nothing"
            yield f"dropped: attempt {number} is over"
            return
        yield from self._perform_all(instructions, had_ended=had_ended)

    def crash(self) -> Iterator[str]:
        """Ends the request as the driver does if an instruction could not be performed."""
        yield from self._perform_all(
            self.machine.crash(InternalError("a bug"), self.now), had_ended=self.answer.has_ended
        )

    def end(self) -> None:
        """Drops the request in whatever state it is in, and checks that everything is released."""
        for _line in self.step(on.Dropped()):
            pass
        held = (self.places, self.open, self.prefills, self.timers, self.is_in_queue)
        assert not any(held), f"not released: {held}"
        assert self.machine.state is State.CLOSED
        assert self._num_freed == 1

    def _perform_all(self, instructions: list[do.Instruction], *, had_ended: bool) -> Iterator[str]:
        shown = [text for instruction in instructions if (text := self._perform(instruction))]
        instructions.clear()  # they are not performed again if the machine crashes
        self._check()
        attempts = ", ".join(self._describe(attempt) for attempt in self.machine.attempts)
        yield f"{self.machine.state.name}{f'[{attempts}]' if attempts else ''}: {', '.join(shown) or 'nothing'}"
        if self.answer.has_ended and not had_ended:
            yield self._describe_end()

    def _describe(self, attempt: Any) -> str:
        nodes = attempt.decode.name if attempt.prefill is None else f"{attempt.decode.name}<-{attempt.prefill.name}"
        doubt = " late" if attempt.is_late else " draining" if attempt.is_draining else ""
        return f"{self._numbers[attempt.group_id]} {attempt.state.name} {nodes}{doubt}"

    def _describe_end(self) -> str:
        samples, failure = self.answer.samples, self.answer.failure
        reasons = [sample.finished.reason.name.lower() if sample.finished else "open" for sample in samples]
        told = "; ".join(
            f"{sample.num_tokens} tokens, {reason}" for sample, reason in zip(samples, reasons, strict=True)
        )
        return f"answer: {told}{'' if failure is None else f'; fails with {failure.reason}: {failure.message}'}"

    # ------------------------------------------------------------ instructions

    def _perform(self, instruction: do.Instruction) -> str:
        """Returns the instruction as text."""
        assert not self._num_freed or isinstance(instruction, do.ReturnPlace), "a closed request gave an instruction"
        match instruction:
            case do.Enqueue(demand):
                assert not self.is_in_queue, "the request is in the queue already"
                self.is_in_queue = True
                kept = [name for name in ("bypasses_limits", "is_undisplaceable") if getattr(instruction, name)]
                return f"Enqueue({', '.join([_show_demand(demand), *kept])})"
            case do.ChangeDemand(demand):
                assert self.is_in_queue, "the request is not in the queue"
                return f"ChangeDemand({_show_demand(demand)})"
            case do.LeaveQueue():
                self.is_in_queue = False
            case do.Hedge(demand, late):
                assert not self.is_in_queue, "a request in the queue asked for a hedge"
                self.num_hedges_wanted += 1
                return f"Hedge({_show_demand(demand)}, late={self._numbers[late]})"
            case do.ReturnPlace(place):
                self.places.remove(place)
            case do.OpenGroup(command, place):
                number = len(self._numbers) + 1
                self._numbers[command.sequence_group_id] = number
                self.group_ids[number] = command.sequence_group_id
                self.transfers[number] = command.transfer_id
                self.open.add(number)
                self._place_of[number] = place
                num_known_tokens = len(command.known_token_ids(command.samples[0]))
                samples = "".join(f" {start.sample}" for start in command.samples)
                return f"OpenGroup({number}, {num_known_tokens} tokens, samples{samples})"
            case do.ChoosePrefill(group, avoided):
                self.choosing.add(number := self._numbers[group])
                return f"ChoosePrefill({number}{f', not {_names(avoided)}' if avoided else ''})"
            case do.Retarget(group, transfer_id, keeps_received):
                number = self._numbers[group]
                assert number in self.open, "a closed group was retargeted"
                self.transfers[number] = transfer_id
                to = "another transfer" if transfer_id else "itself"
                return f"Retarget({number}, to {to}{', keeps received' if keeps_received else ''})"
            case do.StartPrefill(group, _, may_read_held):
                assert self._numbers[group] not in self.prefills, "two prefill calls fill one reservation"
                self.prefills.add(self._numbers[group])
                return f"StartPrefill({self._numbers[group]}{', may read held' if may_read_held else ''})"
            case do.StopPrefill(group):
                self.prefills.remove(self._numbers[group])
            case do.CloseAttempt(group, why, must_cancel):
                number = self._numbers[group]
                self.open.remove(number)
                self.choosing.discard(number)
                self.places.remove(self._place_of[number])
                notes = [repr(why), *(["cancel"] if must_cancel else [])]
                if (rejected := instruction.rejected) is not None:
                    notes += ["no adapter" if rejected.reason is RejectReason.NO_ADAPTER else "no room"]
                notes += ["frees hedge"] if instruction.frees_hedge else []
                return f"CloseAttempt({number}, {', '.join(notes)})"
            case do.SetTimer(timer, at, group):
                self.timers[timer, group] = at
                of = f" {self._numbers[group]}" if group else ""
                return f"SetTimer({timer.name}{of}, {at - self.now:g} s)"
            case do.StopTimer(timer, group):
                del self.timers[timer, group]
                return f"StopTimer({timer.name}{f' {self._numbers[group]}' if group else ''})"
            case do.Deliver(tokens, num_new):
                self._num_delivered += num_new
                first, end = tokens.start_position, tokens.start_position + len(tokens.token_ids)
                of = f"sample {tokens.sample}: " if len(self.answer.samples) > 1 else ""
                return f"Deliver({of}{first}..{end}, {num_new} new)"
            case do.Blame(_, role, incarnation, may_be_request):
                doubt = ", perhaps the request's fault" if may_be_request else ""
                return f"Blame({NodeRole(role).name.lower()} {incarnation.decode()}{doubt})"
            case do.Forgive(incarnations):
                return f"Forgive({_names(incarnations)})" if incarnations else ""
            case do.RecordMigration(node, cause):
                return f"RecordMigration({node}, {cause})"
            case do.Summarize():
                summary: Any = object.__new__(Summary)
                self.answer.close(summary)
            case do.SettleRequest():
                self._num_settled += 1
            case do.FreeKey():
                self._num_freed += 1
                return f"FreeKey({'client left' if instruction.has_client_left else ''})"
            case do.CancelSamples(group, samples_to_cancel):
                assert self._numbers[group] in self.open, "samples of a closed group were cancelled"
                return f"CancelSamples({self._numbers[group]}, {samples_to_cancel})"
        attempt = self._numbers.get(getattr(instruction, "sequence_group_id", b""), "")
        return f"{type(instruction).__name__}({attempt})"

    # ------------------------------------------------------------ invariants

    def _check(self) -> None:
        """Checks after every event that nothing is held twice, lost or forgotten."""
        machine, state = self.machine, self.machine.state
        live = {self._numbers[attempt.group_id] for attempt in machine.attempts}
        assert live == self.open, "the open groups are not those of the running attempts"
        assert len(live) <= 2
        assert self.places == {self._place_of[number] for number in live}, (
            "the places are not those of the running attempts"
        )
        assert not (self.is_in_queue and len(live) == 2), "a third attempt was asked for"
        assert self._num_delivered == self.answer.num_generated_tokens - self._num_known, (
            "a token was not delivered, or delivered twice"
        )
        for timer, group in self.timers:
            assert not group or self._numbers[group] in live, f"{timer.name} runs for an attempt that has ended"
        for attempt in machine.attempts:
            self._check_wait(attempt)
        if len(machine.attempts) == 2:
            older, newer = machine.attempts
            assert older.decode.incarnation != newer.decode.incarnation, "two attempts run on one process"
            assert older.decode.numerics == newer.decode.numerics, "two attempts may compute different tokens"
            assert older.is_in_doubt, "two attempts run although the first is not in doubt"
        if state in {State.ENDED, State.CLOSED}:
            assert not live, "an attempt outlives its request"
            assert not self.prefills, "a prefill call outlives its request"
            assert not self.is_in_queue, "a request that has ended is in the queue"
            assert set(self.timers) <= {(on.Timer.WINDOW, b"")}, "a timer outlives its request"
            assert self._num_settled <= 1, "a request was settled twice"
            assert self.answer.has_ended or state is State.CLOSED, "a reader would wait forever"
        else:
            assert self._num_settled == self._num_freed == 0
            is_under_way = live or self.is_in_queue or self.num_hedges_wanted
            assert is_under_way or state in {State.ENCODING, State.CONCLUDING}, "the request waits for nothing"
            if state is State.CONCLUDING:
                assert (on.Timer.STATS, b"") in self.timers, "no timer ends the wait for statistics"
        assert self._num_freed == (state is State.CLOSED), "the key is freed when and only when the request is closed"

    def _check_wait(self, attempt: Any) -> None:
        """Checks that something ends each wait of an attempt. The node's liveness check ends a wait for tokens."""
        number, group = self._numbers[attempt.group_id], attempt.group_id
        is_granting = (on.Timer.GRANT, group) in self.timers
        is_receiving = (on.Timer.KV, group) in self.timers
        match attempt.state:
            case AttemptState.OPENING:
                assert is_granting, "a grant is waited for without an end"
            case AttemptState.RETARGETING:
                assert is_granting or number in self.choosing, "a grant is waited for without an end"
            case AttemptState.TRANSFERRING:
                assert number in self.prefills or is_receiving, "KV is waited for without an end"
            case AttemptState.DECODING:
                assert not is_granting, "a timer runs that would end an attempt that decodes"
                assert not is_receiving, "a timer runs that would end an attempt that decodes"


def _names(incarnations: Any) -> str:
    return " ".join(sorted(each.decode() for each in incarnations))


def _show_demand(demand: Demand) -> str:
    shown = [f"{len(demand.token_ids)} tokens"]
    for field in fields(demand):
        value = getattr(demand, field.name)
        if field.name in {"excluded", "avoided"} and value:
            shown.append(f"{field.name} {_names(value)}")
        elif field.name == "num_samples" and value > 1:
            shown.append(f"{value} samples")
        elif field.name in {"numerics", "is_scored"} and value:
            shown.append("same numerics" if field.name == "numerics" else "scored")
    return ", ".join(shown)
