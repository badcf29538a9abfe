"""The profile messages of node.proto ⇄ `outrider.profile`."""

from __future__ import annotations

from outrider.profile import (
    DEFAULT_NUM_STEPS,
    DEFAULT_TIMEOUT_SECONDS,
    Profile,
    ProfiledStep,
    ProfileOptions,
    StepKind,
)
from outrider.v1 import node_pb2


def options_to_proto(options: ProfileOptions) -> node_pb2.ProfileRequest:
    return node_pb2.ProfileRequest(
        num_steps=options.num_steps,
        num_traced_steps=options.num_traced_steps,
        timeout_milliseconds=round(options.timeout_seconds * 1000),
    )


def options_from_proto(proto: node_pb2.ProfileRequest) -> ProfileOptions:
    """Raises: InvalidRequestError for a value out of range."""
    return ProfileOptions(
        num_steps=proto.num_steps or DEFAULT_NUM_STEPS,
        num_traced_steps=proto.num_traced_steps,
        timeout_seconds=proto.timeout_milliseconds / 1000 or DEFAULT_TIMEOUT_SECONDS,
    )


def profile_to_proto(profile: Profile) -> node_pb2.ProfileSummary:
    return node_pb2.ProfileSummary(
        node=profile.node,
        steps=[
            node_pb2.StepAccount(
                kind=step.kind,
                num_rows=step.num_rows,
                num_sequences=step.num_sequences,
                nanoseconds={part: max(spent, 0) for part, spent in step.nanoseconds.items()},
                event_loop_nanoseconds=step.event_loop_nanoseconds,
            )
            for step in profile.steps
        ],
        num_traced_steps=profile.num_traced_steps,
        microseconds=round(profile.seconds * 1e6),
        timed_out=profile.timed_out,
    )


def profile_from_proto(proto: node_pb2.ProfileSummary) -> Profile:
    """Raises: ValueError for a kind of step that this version does not know."""
    return Profile(
        node=proto.node,
        steps=tuple(
            ProfiledStep(
                kind=StepKind(step.kind),
                num_rows=step.num_rows,
                num_sequences=step.num_sequences,
                nanoseconds=dict(step.nanoseconds),
                event_loop_nanoseconds=step.event_loop_nanoseconds,
            )
            for step in proto.steps
        ),
        num_traced_steps=proto.num_traced_steps,
        seconds=proto.microseconds / 1e6,
        timed_out=proto.timed_out,
    )
