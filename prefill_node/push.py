"""The push of one transfer, in its own thread: it reads, hashes and sends KV while the forward pass continues.

The engine thread only says which layers and tokens are in the cache; this thread gathers the rows when they can be
sent. Their blocks stay pinned until the push has ended. So a slow decode node never delays the engine, and costs no
memory beyond the window that all pushes to it share.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.kv_cache.planes import STATE_PLANE, PlaneSpec, find_plane
from outrider.engine.kv_cache.sequence_kv import GroupTable
from outrider.engine.ranks.sharded_cache import KVCache, ShardedKVCache
from outrider.errors import AbortedError, OutriderError
from outrider.faults import fault_point
from outrider.kv_transfer.base import MAX_FRAME_BYTES, CommitResult, CommitState, Region, TransferSpec, cut_frames
from outrider.kv_transfer.config import CUDA_IPC
from outrider.kv_transfer.connectors import Connector
from outrider.kv_transfer.reserved_blocks import ReservedBlocks
from outrider.kv_transfer.sender import Sender
from outrider.prefill import TimedPart
from outrider.service.telemetry.logging import get_logger
from prefill_node.jobs import PushOutcome
from prefill_node.pushed_parts import PushedParts, merge_parts
from prefill_node.rank_push import RankFrame, RankPush, RankPushes, to_outrider_error

log = get_logger("prefill_node")


@dataclass(frozen=True, slots=True)
class _Available:
    """A range of KV that is in the cache and will not change."""

    planes: tuple[PlaneSpec, ...]  # planes that all have `layers`
    layers: range
    start_token: int
    end_token: int
    written: Any  # a fence of the cache; once it is reached, the range is written

    def joined(self, later: _Available, max_frame_bytes: int) -> _Available | None:
        """Returns both ranges as one; None if they do not adjoin or exceed a frame of each plane."""
        end, start = (self.planes, self.layers.stop), (later.planes, later.layers.start)
        if end != start or (self.start_token, self.end_token) != (later.start_token, later.end_token):
            return None
        layers = range(self.layers.start, later.layers.stop)
        per_token = len(layers) * max(plane.bytes_per_token_per_layer for plane in self.planes)
        fits = (self.end_token - self.start_token) * per_token <= max_frame_bytes
        return replace(later, layers=layers) if fits else None


_PROGRESS = _Available((), range(0), 0, 0, None)  # nothing is available, but the engine works on the prompt


class KvPush:
    """The push of one transfer. `offer`, `finish` and `interrupt` never block.

    `on_ended` is called exactly once, by the push's thread at its end. After that, the push reads and writes no KV.
    """

    def __init__(
        self,
        *,
        connector: Connector,
        kv_cache: KVCache,
        address: str,
        spec: TransferSpec,
        block_ids: Sequence[int],  # blocks of the prompt's tokens from position 0
        on_ended: Callable[[PushOutcome], None],
        windows: Sequence[GroupTable] = (),
        read_from: int | None = None,
        on_read: Callable[[bool], None] = lambda _has_read: None,
    ) -> None:
        """`windows`: the prompt's blocks in layers with a sliding window, which may change before each `offer`.

        `read_from`: position of the first held token to read from the decode node before anything is sent. After the
        read, `on_read(success)` is called once.
        """
        self._connector = connector
        self._kv_cache = kv_cache
        self._address = address
        self._spec = spec
        self._features = tuple(plane for plane in spec.planes if plane.is_feature)
        self._windows = windows
        self._blocks = ReservedBlocks(kv_cache, block_ids, windows=windows)
        self._read_from = read_from
        self._on_read = on_read
        self._on_ended = on_ended
        # None ends the push, because all has been offered, the push is interrupted, or the receiver ended the transfer.
        self._items: queue.SimpleQueue[_Available | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        self._is_interrupted = False
        self._pushed = PushedParts()
        self._others: RankPushes | None = None
        if isinstance(kv_cache, ShardedKVCache):
            task = RankPush(connector.config, connector.security.config, address, spec)
            self._others = RankPushes(kv_cache.ranks, task)
        self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, layers: range | None, start_token: int, end_token: int) -> None:
        """Offers KV that is in the cache, or that a GPU will write. Tokens outside the transfer are skipped.

        `layers`: layers of the model; None stands for the features, which a forward pass writes at its end.
        """
        if layers is None:
            self._put(self._features, range(1), start_token, end_token)
            return
        for group in self._kv_cache.layer_groups:
            planes = tuple(find_plane(self._spec.planes, name) for name in group.plane_names if group.layers)
            self._put(planes, group.places(layers), start_token, end_token)
            if group.has_states:
                states = find_plane(self._spec.planes, STATE_PLANE)
                self._put((states,), group.places(layers), start_token, end_token)

    def _put(self, planes: tuple[PlaneSpec, ...], layers: range, start_token: int, end_token: int) -> None:
        if planes and layers:
            start_token = max(start_token, self._spec.first_token(planes[0]))
            if start_token < end_token:
                if planes[0].window:
                    self._blocks.update(self._windows)
                self._items.put(_Available(planes, layers, start_token, end_token, self._kv_cache.fence()))

    def use_blocks(self, block_ids: Sequence[int]) -> None:
        """Sets the blocks of a prompt that had none at first. Nothing may have been offered."""
        self._blocks = ReservedBlocks(self._kv_cache, block_ids)

    def note_progress(self) -> None:
        """Tells the decode node that the engine works on the prompt."""
        self._items.put(_PROGRESS)

    def finish(self) -> None:
        """Makes the push commit the transfer when everything offered has been sent."""
        self._items.put(None)

    def interrupt(self) -> None:
        """Makes the push end soon without a commit. Idempotent."""
        with self._lock:
            self._is_interrupted = True
            sender = self._sender
        self._items.put(None)
        if sender is not None:  # otherwise the push is still connecting and ends once connected
            sender.interrupt()

    def join(self, timeout_seconds: float) -> None:
        """Waits at most this long for the thread's end."""
        self._thread.join(timeout_seconds)

    # ---- the push's thread

    def _run(self) -> None:
        try:
            fault_point("prefill.before_push")
            sender = self._connector.connect(self._address, self._spec)
        except Exception as error:  # noqa: BLE001 thread boundary: the failure is reported in the outcome
            self._on_ended(PushOutcome(error=to_outrider_error(error)))
            return
        with self._lock:
            self._sender = sender
            is_interrupted = self._is_interrupted
        if is_interrupted:
            self._on_ended(PushOutcome(error=AbortedError("the push was cancelled")))
        else:
            sender.when_acknowledged(self._pushed.acknowledge)
            sender.when_ended(lambda: self._items.put(None))  # a refusal ends the push while it waits for KV
            if self._read_from is not None:
                self._on_read(self._has_read_held(sender, self._read_from))
            self._on_ended(self._push(sender))
        sender.cancel()  # does not wait for the peer, which may be gone

    def _has_read_held(self, sender: Sender, start_token: int) -> bool:
        """Reads the held prefix. Returns False if it did not arrive completely; then none of it is used."""
        largest = min(sender.max_frame_bytes, MAX_FRAME_BYTES)  # messages carry what is read
        regions = itertools.chain.from_iterable(
            self._cut(largest, (plane,), range(plane.num_layers), start_token, self._spec.start_token)
            for plane in self._spec.planes
        )
        try:
            sender.read(regions, self._blocks.write)
        except Exception as error:  # noqa: BLE001 everything is computed instead
            log.warning(
                "the held prefix could not be read; all of it is computed", error=to_outrider_error(error).message
            )
            return False
        return True

    def _push(self, sender: Sender) -> PushOutcome:
        error: OutriderError | None = None
        committed_at: float | None = None
        pushed: tuple[TimedPart, ...] = ()
        try:
            for item in self._available(sender):
                self._send(sender, item)
            others_pushed = () if self._others is None else self._others.settle(sender)
            fault_point("prefill.before_commit")
            self._raise_unless_committed(sender.commit())
            fault_point("prefill.committed")
            committed_at = time.monotonic()
            pushed = merge_parts([*self._pushed.settle(committed_at), *others_pushed])
        except Exception as failure:  # noqa: BLE001 thread boundary: the failure is reported in the outcome
            error = to_outrider_error(failure)
            if self._others is not None:
                self._others.cancel()
        return PushOutcome(
            connector=sender.connector,
            kv_bytes=sender.payload_bytes,
            committed_at=committed_at,
            pushed=pushed,
            error=error,
        )

    def _raise_unless_committed(self, result: CommitResult) -> None:
        if result.state is CommitState.INCOMPLETE:
            until, end = result.complete_until, self._spec.end_token
            problem = f"lacks KV from token {until} of {end} on" if until < end else "has other KV than was sent"
            raise AbortedError(f"the decode node {problem}", reason="TRANSFER_INCOMPLETE")
        if result.state is CommitState.UNKNOWN:
            raise AbortedError("the decode node no longer expects the transfer", reason="TRANSFER_UNKNOWN")

    def _available(self, sender: Sender) -> Iterator[_Available]:
        """Yields the offered ranges until the end, those that wait together joined where they fit into one frame.

        While waiting, keeps the receiver's timeout from expiring.
        """
        held: _Available | None = None
        while True:
            try:
                item = self._items.get(held is None, sender.keep_alive_seconds)
            except queue.Empty:
                if held is None:
                    sender.keep_alive()
                else:
                    yield held
                    held = None
                continue
            if item is _PROGRESS:
                sender.keep_alive(has_progressed=True)
                continue
            joined = held and item and held.joined(item, sender.max_frame_bytes)
            if held is not None and joined is None:
                yield held
            if item is None:
                return
            held = joined or item

    def _send(self, sender: Sender, item: _Available) -> None:
        started_at, num_bytes, is_divided = None, sender.payload_bytes, False
        for region in self._cut(sender.max_frame_bytes, item.planes, item.layers, item.start_token, item.end_token):
            for rank, part, request in self._blocks.parts(region, item.written):
                fault_point("prefill.frame")
                if request is not None and rank:
                    assert self._others is not None
                    self._others.put(rank, RankFrame(part, request))
                    is_divided = True
                    continue
                read = self._blocks.take if sender.connector == CUDA_IPC else self._blocks.read
                payload = read(part, item.written)
                started_at = started_at or time.monotonic()
                sender.put(part, payload)
        if started_at is not None:
            self._pushed.add(started_at, sender.payload_bytes - num_bytes, last_frame=sender.num_frames)
        if is_divided:
            sender.keep_alive()  # other ranks' frames do not extend this stream's timeout

    def _cut(
        self, largest: int, planes: Sequence[PlaneSpec], layers: range, start_token: int, end_token: int
    ) -> Iterator[Region]:
        """Yields the frames, of at most `largest` bytes each, that cover these planes, layers and tokens. Heads are
        divided if all of them do not fit into a frame, as those of large states.
        """
        for plane in planes:
            num_heads = largest // plane.bytes_per_head
            for heads in self._kv_cache.head_ranges(plane.name):
                for first in heads[::num_heads]:
                    part = range(first, min(first + num_heads, heads.stop))
                    yield from cut_frames(plane, part, layers, start_token, end_token, max_frame_bytes=largest)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of a chunk's layers. A group fills about one frame and is pushed as a whole. Features come last."""

    num_layers: int
    tokens_per_frame: int  # for one layer

    @classmethod
    def of(cls, kv_cache: KVCache, *, frame_bytes: int) -> LayerGroups:
        """Returns the groups of a model's layers."""
        layered = [plane for plane in kv_cache.planes if not (plane.is_feature or plane.is_state)]
        num_layers = sum(len(group.layers) for group in kv_cache.layer_groups)
        return cls(num_layers, frame_bytes // max(plane.bytes_per_token_per_layer for plane in layered))

    def ending_at(self, layer: int, *, num_tokens: int) -> range | None:
        """Returns the group that ends with this layer, or None. `num_tokens`: a sequence's tokens in the chunk."""
        size = min(max(self.tokens_per_frame // num_tokens, 1), self.num_layers)
        is_last = layer == self.num_layers - 1
        if (layer + 1) % size and not is_last:
            return None
        return range(layer - layer % size, layer + 1)
