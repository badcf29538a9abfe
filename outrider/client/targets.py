"""The routers that a client may call."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_TARGET = "127.0.0.1:50051"
_LISTS_OF_THEIR_OWN = ("ipv4:", "ipv6:")  # gRPC targets that may contain commas


class Targets:
    """A client's targets, and which of them answered last: calls begin there. Shared by a client's threads."""

    def __init__(self, targets: str | Sequence[str]) -> None:
        """`targets` is one target, several with commas between them, or a sequence. Raises: ValueError for none."""
        if isinstance(targets, str):
            targets = [targets] if targets.startswith(_LISTS_OF_THEIR_OWN) else targets.split(",")
        self.all = tuple(dict.fromkeys(target.strip() for target in targets if target.strip()))
        if not self.all:
            raise ValueError("a client needs at least one target")
        self.current = self.all[0]

    def __len__(self) -> int:
        return len(self.all)

    def after(self, target: str) -> str:
        return self.all[(self.all.index(target) + 1) % len(self.all)]

    def in_order(self) -> tuple[str, ...]:
        """Every target once, the current one first."""
        first = self.all.index(self.current)
        return (*self.all[first:], *self.all[:first])
