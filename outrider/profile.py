"""A profile of an engine's steps, as values: where each millisecond went. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError

DEFAULT_NUM_STEPS = 50
MOST_STEPS = 1000
MOST_TRACED_STEPS = 200  # a trace has thousands of events for each step
DEFAULT_TIMEOUT_SECONDS = 30.0
MOST_TIMEOUT_SECONDS = 600.0

FORWARD_PREFIX = "forward."
FORWARD_REST = "forward.rest"


class Part(enum.StrEnum):
    """What the engine thread does with its time, in the order of a step. Every nanosecond belongs to one part.

    IDLE waits for work. COMMANDS takes sequences in and lets them go, and tends transfers.
    CPU_TURN waits for nodes that compute on the same processors (see outrider.engine.cpu_turns).
    DRAFT_WAIT waits for draft nodes, within the step's budget; DRAFTING is the rest of
    gathering drafts. SCHEDULE plans, BATCH builds the forward's input, FORWARD runs the
    model. HAND_OFF offers KV to pushes (prefill nodes). SAMPLING decides every row; COMMIT
    judges drafts, frees slots, publishes blocks; EMIT gives events to the event loop.

    FORWARD is split into "forward.NAME" by whatever phases the forward reports; what none
    of them claims is FORWARD_REST.
    """

    IDLE = "idle"
    COMMANDS = "commands"
    CPU_TURN = "cpu_turn"
    DRAFT_WAIT = "draft_wait"
    DRAFTING = "drafting"
    SCHEDULE = "schedule"
    BATCH = "batch"
    FORWARD = "forward"
    HAND_OFF = "hand_off"
    SAMPLING = "sampling"
    COMMIT = "commit"
    EMIT = "emit"


class StepKind(enum.StrEnum):
    """DECODE: one row for each sequence. VERIFY: draft tokens among them. PROMPT: prompt tokens among them."""

    DECODE = "decode"
    VERIFY = "verify"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One step, from the end of the one before it to its own end."""

    kind: StepKind
    num_rows: int
    num_sequences: int
    nanoseconds: Mapping[str, int]  # by part; "forward.NAME" for the forward's phases
    event_loop_nanoseconds: int  # processor time of the event loop meanwhile: gRPC, beside the step


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is asked of a node. Raises: InvalidRequestError, which names the field."""

    num_steps: int = DEFAULT_NUM_STEPS
    num_traced_steps: int = 0  # after those: the trace slows what it watches
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("num_steps", self.num_steps, 1, MOST_STEPS),
            ("num_traced_steps", self.num_traced_steps, 0, MOST_TRACED_STEPS),
            ("timeout_seconds", self.timeout_seconds, 0.1, MOST_TIMEOUT_SECONDS),
        ):
            if not least <= value <= most:
                raise InvalidRequestError(f"{name} is {value:g}, must be {least:g} to {most:g}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was captured: fewer steps than asked for where the time ran out."""

    node: str = ""
    steps: tuple[ProfiledStep, ...] = ()
    num_traced_steps: int = 0
    seconds: float = 0.0  # from the request to the last step
    timed_out: bool = False
    kv_bytes_per_token: int = 0  # of keys and values in the node's cache
    feature_bytes_per_token: int = 0  # beside them, for a drafter head


@dataclass(frozen=True, slots=True)
class Captured:
    """What the engine thread hands over. `export_trace` writes it as gzipped Chrome trace JSON; slow, any thread."""

    profile: Profile  # without what the event loop knows: node, seconds, timed_out
    export_trace: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """One profile under way. `on_done` is called once, from the engine thread, and must not block."""

    options: ProfileOptions
    on_done: Callable[[Captured], object]


@dataclass(frozen=True, slots=True)
class StartProfile:
    """A command to an engine thread."""

    capture: Capture


@dataclass(frozen=True, slots=True)
class EndProfile:
    """Ends a capture whose time is over. Idempotent."""

    capture: Capture


def parts_in_order(steps: Sequence[ProfiledStep]) -> list[str]:
    """Those of a step in its order, the forward's phases by name in the forward's place; idle time is left out."""
    found = {part for step in steps for part in step.nanoseconds} - {Part.IDLE}
    order: dict[str, int] = {part: index for index, part in enumerate(Part)}
    return sorted(found, key=lambda part: (order.get(part, order[Part.FORWARD]), part == FORWARD_REST, part))
