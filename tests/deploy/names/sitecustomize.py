"""Stands in for the cluster's DNS: Python imports this file when it starts with this folder in PYTHONPATH.

NAMES_FILE is the path of a JSON file with a list of addresses, which may have ports, for each host name. The file is
read at each lookup.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from outrider.service import resolver


def _names() -> dict[str, list[str]]:
    names: dict[str, list[str]] = json.loads(Path(os.environ["NAMES_FILE"]).read_text(encoding="utf-8"))
    return names


async def resolve_from_file(target: str) -> list[str]:
    """Replaces `outrider.service.resolver.resolve_with_dns`."""
    host = resolver.host_name_of(target)
    if not host:
        return [target]
    addresses = _names().get(host, [])
    if not addresses:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    port = target.rpartition(":")[2]
    return sorted(address if ":" in address else f"{address}:{port}" for address in addresses)


resolver.resolve_with_dns = resolve_from_file
