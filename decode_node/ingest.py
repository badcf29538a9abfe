"""Reception of KV from prefill nodes into reserved blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.kv_transfer.base import DrainState, TransferSpec
from outrider.kv_transfer.receiver import KvReceiver
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.rpc.tls import PeerSecurity
from outrider.service.address import is_local, is_wildcard, own_host, split_port
from outrider.service.security import warn_if_unauthenticated

if TYPE_CHECKING:
    from outrider.engine.kv_cache.planes import PlaneSpec
    from outrider.engine.kv_cache.sequence_kv import GroupTable
    from outrider.engine.ranks.sharded_cache import KVCache


class Ingest:
    """The receiver, its transfers into reserved blocks, and this node's KV address."""

    def __init__(
        self, receiver: KvReceiver, kv_cache: KVCache, *, host: str, advertise_address: str, security: PeerSecurity
    ) -> None:
        """`host`: the host that the receiver binds. `advertise_address`: the "host" or "host:port" by which others
        reach this node; only the host is used.
        """
        self.receiver = receiver
        self.inbox = receiver.inbox
        self._kv_cache = kv_cache
        self._host = host
        self._security = security
        self._advertised_host = split_port(advertise_address)[0]
        self._port = 0

    def start(self) -> None:
        """Starts the receiver. Raises: ConfigError."""
        warn_if_unauthenticated(
            self._host,
            what="this node's KV ingest",
            is_protected=self._security.is_enabled,
            fix="bind kv_transfer.host to a private network, or set security.tls",
        )
        self._port = self.receiver.start()

    def address(self, reached_host: str) -> str:
        """Returns the host:port that a prefill node dials."""
        return f"{kv_host(self._host, self._advertised_host, reached_host)}:{self._port}"

    def open(
        self,
        transfer_id: bytes,
        block_ids: Sequence[int],
        *,
        windows: Sequence[GroupTable] = (),
        start_token: int,
        end_token: int,
        planes: tuple[PlaneSpec, ...] = (),
        are_held: Callable[[], bool] = lambda: True,
    ) -> None:
        """Expects a transfer. `planes`: by default all. `are_held`, `windows`: see ReservedBlocks."""
        self.inbox.open(
            TransferSpec(
                transfer_id=transfer_id,
                incarnation=self.inbox.incarnation,
                start_token=start_token,
                end_token=end_token,
                planes=planes or self._kv_cache.planes,
            ),
            ReservedBlocks(self._kv_cache, block_ids, are_held, windows=windows),
        )

    def close(self, transfer_id: bytes) -> DrainState:
        """Closes the transfer, without waiting for a write in progress, since steps must go on.

        Returns DRAINED if no further byte will be written. If it returns UNKNOWN, the caller keeps the blocks and tries
        again.
        """
        return self.receiver.close(transfer_id, timeout_seconds=0.0)


def kv_host(bound: str, advertised: str, reached: str) -> str:
    """Returns the host that prefill nodes dial. They may run on other machines than the router.

    This is the advertised host if there is one, else the bound interface if there is one, else the host by which the
    router reached this node. If the router reached it by a local host, the address of the interface with a route to
    other networks is returned instead.
    """
    if advertised:
        return advertised
    if not is_wildcard(bound):
        return f"[{bound}]" if ":" in bound else bound
    return own_host() if is_local(reached) else reached
