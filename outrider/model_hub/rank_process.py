"""`python -m outrider.model_hub.rank_process COMMANDS KV TASKS`: a rank other than 0, which `outrider.model_hub.ranks`
starts.

The arguments are file descriptors of sockets to rank 0.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module

from outrider.engine.memory import PoolSize
from outrider.engine.ranks.channel import Channel, RankLostError
from outrider.errors import ConfigError, ModelError
from outrider.lossy_stream import exit_now, guard_standard_streams
from outrider.model_hub.shard import START_SECONDS, Start, open_shard


def main(argv: Sequence[str]) -> int:
    """Runs the rank. Returns the exit status."""
    guard_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process group gets these too, but rank 0 stops the ranks
    try:
        _work(*(socket.socket(fileno=int(descriptor)) for descriptor in argv))
    except RankLostError:
        return 1  # rank 0 has ended, and reports why if it can
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"a rank cannot start: {error}\n")
        return 1
    return 0


def _work(commands: socket.socket, kv: socket.socket, tasks: socket.socket) -> None:
    from outrider.engine.ranks.commands import Stop
    from outrider.engine.ranks.worker import RankWorker

    hello = Channel(commands, peer="rank 0", timeout_seconds=START_SECONDS)
    start: Start | Stop = hello.receive(begins_within_seconds=START_SECONDS)
    if isinstance(start, Stop):
        return  # the node cannot start
    # These imports take seconds, for which no collective should wait.
    import_module("outrider.model_hub." + ("pipeline" if start.config.pipeline_parallel_size > 1 else "load"))
    import outrider.engine.stage_runner  # noqa: F401

    hello.send(None)
    shard = open_shard(start)
    hello.send(shard.room)
    pool: tuple[PoolSize, tuple[int, ...]] | Stop = hello.receive(begins_within_seconds=None)
    if isinstance(pool, Stop):
        return
    size, taps = pool
    cache = shard.model.make_cache(size.num_blocks, start.block_size, size.window_blocks)
    RankWorker(
        runner=shard.make_runner(cache, taps),
        kv_cache=cache,
        commands=Channel(commands, peer="rank 0", timeout_seconds=start.timeout_seconds),
        kv=Channel(kv, peer="rank 0", timeout_seconds=start.timeout_seconds),
        tasks=tasks,
        timeout_seconds=start.timeout_seconds,
    ).run()


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))  # torch's shutdown takes a second, for which rank 0 would wait
