"""A network between real processes that tests can break, with a TCP proxy for each address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from tests.support.loop_thread import LoopThread

CHUNK_BYTES = 65_536


class Connection:
    """A proxied connection. Only the event loop's thread uses it."""

    def __init__(self, ends: set[str], inner: asyncio.StreamWriter) -> None:
        self.ends = ends  # names of the processes at both ends
        self._writers = [inner]

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)

    def abort(self) -> None:
        """Resets both ends."""
        for writer in self._writers:
            with contextlib.suppress(OSError):
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # struct linger: on, 0 seconds
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


class Network:
    """Runs its proxies in a thread. `heal` undoes `partition` and `slow`, and delivers what they held back."""

    def __init__(self) -> None:
        self._loop = LoopThread()
        self._connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._cut_off: set[str] = set()
        self._delays: dict[str, float] = {}
        self._is_whole = asyncio.Event()
        self._is_whole.set()

    def listen(
        self,
        to: str,
        upstream: Callable[[], tuple[str, int]],
        *,
        source: Callable[[int], str],
        address: str,
        port: int = 0,
    ) -> int:
        """Returns the port that leads to process `to`. `source` names the process behind a client's port."""

        async def start() -> int:
            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                peer_port = writer.get_extra_info("peername")[1]
                from_ = await asyncio.to_thread(source, peer_port)
                await self._carry({to, from_}, upstream, reader, writer)

            server = await asyncio.start_server(accept, address, port)
            self._servers.append(server)
            return int(server.sockets[0].getsockname()[1])

        return self._loop.run(start())

    def close_connections(self, name: str) -> None:
        """Resets every present connection of this process."""

        async def close() -> None:
            for connection in tuple(self._connections):
                if name in connection.ends:
                    connection.abort()

        self._loop.run(close())

    def partition(self, name: str) -> None:
        """Holds back everything to and from this process until the network is healed."""

        async def cut() -> None:
            self._cut_off.add(name)
            self._is_whole.clear()

        self._loop.run(cut())

    def slow(self, name: str, seconds: float) -> None:
        """Delays everything to and from this process."""
        self._delays[name] = seconds

    def heal(self) -> None:
        async def heal() -> None:
            self._cut_off.clear()
            self._delays.clear()
            self._is_whole.set()

        self._loop.run(heal())

    def stop(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for connection in tuple(self._connections):
                connection.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._loop.run(end())
        self._loop.stop()

    async def _carry(
        self,
        ends: set[str],
        upstream: Callable[[], tuple[str, int]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        connection = Connection(ends, writer)
        self._connections.add(connection)
        try:
            await self._pass(ends)
            outer_reader, outer_writer = await asyncio.open_connection(*upstream())
            connection.add(outer_writer)
            pumps = [
                asyncio.ensure_future(self._pump(ends, reader, outer_writer)),
                asyncio.ensure_future(self._pump(ends, outer_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens there now, so the client's connection breaks too
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def _pump(self, ends: set[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._pass(ends)
                writer.write(data)
                await writer.drain()

    async def _pass(self, ends: set[str]) -> None:
        delay = max((self._delays.get(name, 0.0) for name in ends), default=0.0)
        if delay:
            await asyncio.sleep(delay)
        while ends & self._cut_off:
            await self._is_whole.wait()


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
