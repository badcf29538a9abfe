"""Converts the profile messages of node.proto to and from `outrider.profile`."""

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
from outrider.wire.fields import Conversion, Fields


def options_to_proto(options: ProfileOptions) -> node_pb2.ProfileRequest:
    return node_pb2.ProfileRequest(
        num_steps=options.num_steps,
        num_traced_steps=options.num_traced_steps,
        timeout_milliseconds=round(options.timeout_seconds * 1000),
    )


def options_from_proto(proto: node_pb2.ProfileRequest) -> ProfileOptions:
    """Raises: InvalidRequestError if a value is out of range."""
    return ProfileOptions(
        num_steps=proto.num_steps or DEFAULT_NUM_STEPS,
        num_traced_steps=proto.num_traced_steps,
        timeout_seconds=proto.timeout_milliseconds / 1000 or DEFAULT_TIMEOUT_SECONDS,
    )


_STEP = Fields(
    ProfiledStep,
    node_pb2.StepAccount,
    kind=Conversion(str, StepKind),
    nanoseconds=Conversion(lambda parts: {part: max(spent, 0) for part, spent in parts.items()}, dict),
)
PROFILE = Fields(Profile, node_pb2.ProfileSummary, steps=_STEP)
"""Converts a Profile. `from_proto` raises ValueError if this version does not know a step's kind."""
