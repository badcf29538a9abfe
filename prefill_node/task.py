"""One prefill job in work: its sequence, its push, and the times that its answer tells."""

from __future__ import annotations

import time
from dataclasses import dataclass

from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.scheduler import EngineSequence
from prefill_node.jobs import PrefillJob, PrefillResult, PushOutcome
from prefill_node.push import KvPush


@dataclass(slots=True, kw_only=True)
class PrefillTask:
    """Owned by the engine thread."""

    job: PrefillJob
    sequence: EngineSequence
    push: KvPush | None = None  # since its admission
    pinned: SequenceKV | None = None  # what the push may still read, once nothing is computed any more
    is_in_work: bool = False  # computed or pushed: no longer held
    is_cancelled: bool = False
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    compute_started_at: float | None = None
    compute_ended_at: float | None = None

    @classmethod
    def of(cls, job: PrefillJob) -> PrefillTask:
        sequence = EngineSequence(
            key=job.job_id,
            token_ids=list(job.token_ids),
            priority=job.priority,
            cache_salt=job.cache_salt,
            arrival=job.job_id,
            needs_logits=False,
        )
        return cls(job=job, sequence=sequence)

    def pin(self) -> None:
        """Keeps what the push may still read when the sequence leaves the batch. Idempotent."""
        kv = self.sequence.kv
        if kv is not None and self.push is not None and self.pinned is None:
            self.pinned = kv.fork()

    def unpin(self) -> None:
        if self.pinned is not None:
            self.pinned.free()

    def begin_compute(self) -> None:
        """Of its first chunk; later calls change nothing."""
        if self.compute_started_at is None:
            self.compute_started_at = time.monotonic()

    def end_compute(self) -> None:
        """The prompt is computed: the push has been offered all of it."""
        assert self.push is not None
        self.compute_ended_at = time.monotonic()
        self.push.finish()

    def result(self, outcome: PushOutcome) -> PrefillResult:
        """The answer after a push that was committed."""
        assert outcome.committed_at is not None
        assert self.compute_ended_at is not None
        first_frame_at = outcome.first_frame_at if outcome.first_frame_at is not None else outcome.committed_at
        exposed_from = self.compute_ended_at
        if outcome.first_frame_at is not None:
            exposed_from = max(exposed_from, outcome.first_frame_at)
        started_at = self.compute_started_at
        return PrefillResult(
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=self.num_computed_tokens,
            compute_seconds=0.0 if started_at is None else self.compute_ended_at - started_at,
            connector=outcome.connector,
            kv_bytes=outcome.kv_bytes,
            transfer_seconds=outcome.committed_at - first_frame_at,
            exposed_seconds=max(outcome.committed_at - exposed_from, 0.0),
        )
