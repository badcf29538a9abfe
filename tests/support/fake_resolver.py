"""A name server for tests."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping


class FakeResolver:
    """Answers with the addresses that were set last for the name. Other names are unknown."""

    def __init__(self, answers: Mapping[str, Iterable[str]]) -> None:
        self._answers = {target: list(addresses) for target, addresses in answers.items()}
        self.num_lookups = 0

    def set(self, target: str, *addresses: str) -> None:
        """Sets the addresses from the next lookup on. Without addresses the lookup fails."""
        self._answers[target] = list(addresses)

    async def __call__(self, target: str) -> list[str]:
        self.num_lookups += 1
        addresses = self._answers.get(target, [])
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return list(addresses)
