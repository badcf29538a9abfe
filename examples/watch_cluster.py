"""Prints the cluster's nodes once a second.

python examples/watch_cluster.py [HOST:PORT [COUNT]]
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from outrider.client import AsyncClient


async def main(target: str, count: int) -> None:
    async with AsyncClient(target) as client, aclosing(client.watch_cluster(interval_seconds=1.0)) as reports:
        async for status in reports:
            print(f"{status.num_requests_running} running, {status.num_requests_waiting} waiting")
            for node in status.nodes:
                state = node.state.name.lower() if node.state is not None else "?"
                print(f"  {node.name:<28} {state:<9} step {node.step:<8} {node.load.tokens_per_second:8.1f} tokens/s")
            count -= 1
            if count == 0:
                return


if __name__ == "__main__":
    arguments = sys.argv[1:]
    asyncio.run(main(arguments[0] if arguments else "127.0.0.1:50051", int(arguments[1]) if len(arguments) > 1 else -1))
