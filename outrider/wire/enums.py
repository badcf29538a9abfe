"""Tables that convert between the enums of router.proto and those of Outrider, one table per enum."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

from outrider.node import NodeRole, NodeState
from outrider.request import FinishReason, LogprobsMode, VerificationMethod
from outrider.v1 import router_pb2
from outrider.wire.fields import Conversion

Member = TypeVar("Member", bound=enum.Enum)


class EnumTable(Generic[Member]):
    """The members of a Python enum and their numbers on the wire; the proto name of member X is PREFIX_X."""

    def __init__(self, members: type[Member], proto: Any, prefix: str) -> None:
        self.members = members
        self._numbers: dict[Member, int] = {member: proto.Value(f"{prefix}_{member.name}") for member in members}
        self._by_number = {number: member for member, number in self._numbers.items()}

    def to_proto(self, member: Member | None) -> Any:
        """Returns the member's number; UNSPECIFIED for None."""
        return 0 if member is None else self._numbers[member]

    def from_proto(self, number: int) -> Member:
        """Returns the number's member. Raises: ValueError if the number is UNSPECIFIED or unknown to this version."""
        member = self._by_number.get(number)
        if member is None:
            raise ValueError(f"{number} is not a known {self.members.__name__}")
        return member

    def from_proto_or(self, unknown: Member | None) -> Conversion:
        """Returns a conversion that gives `unknown` for UNSPECIFIED and for numbers that this version does not know."""
        return Conversion(self.to_proto, lambda number: self._by_number.get(number, unknown))


FINISH_REASONS = EnumTable(FinishReason, router_pb2.FinishReason, "FINISH_REASON")
LOGPROBS_MODES = EnumTable(LogprobsMode, router_pb2.LogprobsMode, "LOGPROBS_MODE")
NODE_ROLES = EnumTable(NodeRole, router_pb2.NodeRole, "NODE_ROLE")
NODE_STATES = EnumTable(NodeState, router_pb2.NodeState, "NODE_STATE")
VERIFICATION_METHODS = EnumTable(VerificationMethod, router_pb2.VerificationMethod, "VERIFICATION_METHOD")
