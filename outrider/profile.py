"""Plain data types for the profile of an engine's steps: the time spent in each part of a step. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError

DEFAULT_NUM_STEPS = 50
MAX_STEPS = 1000
MAX_TRACED_STEPS = 200  # few, as a trace has thousands of events for each step
DEFAULT_TIMEOUT_SECONDS = 30.0
MAX_TIMEOUT_SECONDS = 600.0

FORWARD_PREFIX = "forward."
FORWARD_REST = "forward.rest"


class Part(enum.StrEnum):
    """The engine thread's activities, in the order of a step. Every nanosecond belongs to one part.

    IDLE waits for work. COMMANDS admits and removes sequences, and handles transfers. CPU_TURN waits for nodes that
    compute on the same processors (see outrider.engine.cpu_turns). DRAFT_WAIT waits for draft nodes, within the
    step's budget; DRAFTING is the rest of gathering drafts. SCHEDULE plans, BATCH builds the forward's input, FORWARD
    runs the model. HAND_OFF offers KV to pushes (prefill nodes). SAMPLING decides every row; COMMIT judges drafts,
    frees slots, publishes blocks; EMIT gives events to the event loop.

    FORWARD is split into "forward.NAME" by the phases that the forward reports; the rest is FORWARD_REST.
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
    """DECODE: one row for each sequence. VERIFY: rows include draft tokens. PROMPT: rows include prompt tokens."""

    DECODE = "decode"
    VERIFY = "verify"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """One step, from the end of the previous step to its own end."""

    kind: StepKind
    num_rows: int
    num_sequences: int
    nanoseconds: Mapping[str, int]  # time of each part; "forward.NAME" for the forward's phases
    event_loop_nanoseconds: int  # processor time that the event loop used during the step, e.g. for gRPC


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of a profile. Raises: InvalidRequestError, which names the field."""

    num_steps: int = DEFAULT_NUM_STEPS
    num_traced_steps: int = 0  # traced steps come after all others, since tracing slows them
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("num_steps", self.num_steps, 1, MAX_STEPS),
            ("num_traced_steps", self.num_traced_steps, 0, MAX_TRACED_STEPS),
            ("timeout_seconds", self.timeout_seconds, 0.1, MAX_TIMEOUT_SECONDS),
        ):
            if not least <= value <= most:
                raise InvalidRequestError(f"{name} is {value:g}, must be {least:g} to {most:g}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A captured profile. It has fewer steps than requested if the time ran out."""

    node: str = ""
    steps: tuple[ProfiledStep, ...] = ()
    num_traced_steps: int = 0
    seconds: float = 0.0  # time from the request to the last step
    timed_out: bool = False
    kv_bytes_per_token: int = 0  # size of a token's keys and values in the node's cache
    feature_bytes_per_token: int = 0  # additional size of a token's features for a drafter head
    num_longest_tokens: int = 0  # of the longest sequence of a step
    longest_kv_bytes: int = 0  # size of that sequence's keys and values
    weights: str = ""  # the format of the model's weights


@dataclass(frozen=True, slots=True)
class Captured:
    """The engine thread's result. `export_trace` returns gzipped Chrome trace JSON; it is slow, and any thread may call
    it.
    """

    profile: Profile  # without the fields that the event loop sets: node, seconds, timed_out
    export_trace: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """One profile in progress. `on_done` is called once, from the engine thread, and must not block."""

    options: ProfileOptions
    on_done: Callable[[Captured], object]


@dataclass(frozen=True, slots=True)
class StartProfile:
    """The command to an engine thread to begin a capture."""

    capture: Capture


@dataclass(frozen=True, slots=True)
class EndProfile:
    """The command to end a capture whose time is over. Idempotent."""

    capture: Capture


def parts_in_order(steps: Sequence[ProfiledStep]) -> list[str]:
    """Returns the parts except idle time, in the order of a step. The forward's phases, by name, replace FORWARD."""
    found = {part for step in steps for part in step.nanoseconds} - {Part.IDLE}
    order: dict[str, int] = {part: index for index, part in enumerate(Part)}
    return sorted(found, key=lambda part: (order.get(part, order[Part.FORWARD]), part == FORWARD_REST, part))
