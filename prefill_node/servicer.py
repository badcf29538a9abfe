"""PrefillService: converts and checks calls, runs their jobs, and records their spans."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from opentelemetry.trace import SpanKind

from outrider.errors import CapacityError, InvalidRequestError, MismatchError, OutriderError, PeerLostError
from outrider.faults import fault_point
from outrider.kv_transfer.base import ID_BYTES
from outrider.node import ModelInfo
from outrider.prefill import PrefillCall, PrefillFigures
from outrider.request import MAX_CACHE_SALT_BYTES, MAX_TOP_LOGPROBS
from outrider.service.open_calls import OpenCalls
from outrider.service.rpc_errors import Context, rpc_errors
from outrider.service.telemetry.tracing import NO_TRACER, Metadata, Tracer, caller_of_call, fail
from outrider.v1 import prefill_pb2, prefill_pb2_grpc
from outrider.wire.prefill import CALL, figures_to_proto
from prefill_node.jobs import CancelJob, Command, JobEnded, PrefillJob


class PendingJobs:
    """At most `max_jobs` waiting or running jobs, by id. Used only on the event loop."""

    def __init__(self, *, submit: Callable[[Command], None], max_jobs: int) -> None:
        self._submit = submit
        self._max_jobs = max_jobs
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[PrefillFigures]] = {}
        self._is_draining = False

    @property
    def num_jobs(self) -> int:
        return len(self._waiting)

    async def run(self, call: PrefillCall) -> PrefillFigures:
        """Runs one job, from queue to commit. If the coroutine is cancelled, the job's computation and push end.

        Raises: PeerLostError when draining, CapacityError if the queue is full, or the error that ended the job.
        """
        if self._is_draining:
            raise PeerLostError("the prefill node is draining", reason="DRAINING")
        if len(self._waiting) >= self._max_jobs:
            raise CapacityError(f"{self._max_jobs} prompts are already running or waiting")
        job = PrefillJob(next(self._ids), call)
        future: asyncio.Future[PrefillFigures] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = future
        self._submit(job)
        try:
            return await future
        finally:
            if self._waiting.pop(job.job_id, None) is not None:  # the call was cancelled before the job ended
                self._submit(CancelJob(job.job_id))

    def deliver(self, ended: Sequence[JobEnded]) -> None:
        for end in ended:
            future = self._waiting.pop(end.job_id, None)
            if future is None or future.done():
                continue
            if isinstance(end.result, OutriderError):
                future.set_exception(end.result)
            else:
                future.set_result(end.result)

    def fail_all(self, error: OutriderError) -> None:
        """Fails all jobs, because a drain's deadline has passed or the engine has failed."""
        self.deliver([JobEnded(job_id, error) for job_id in self._waiting])

    def start_draining(self) -> None:
        """Refuses new jobs from now on."""
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model and limits that requests are checked against."""

    node_name: str
    info: ModelInfo
    max_tokens: int  # maximum tokens of one prompt: the model's window or the KV pool's size if smaller


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """PrefillService. Until the model is loaded and `serve` is called, it asks routers to retry."""

    def __init__(self, tracer: Tracer = NO_TRACER) -> None:
        self._tracer = tracer
        self._jobs: PendingJobs | None = None
        self._served: ServedModel | None = None
        self.calls = OpenCalls()

    def serve(self, jobs: PendingJobs, served: ServedModel) -> None:
        self._jobs, self._served = jobs, served

    async def Prefill(  # noqa: N802 named by the proto
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> prefill_pb2.PrefillResponse:
        self.calls.enter(context)
        async with rpc_errors(context):
            if self._jobs is None or self._served is None:
                raise PeerLostError("the prefill node is still loading its model", reason="STARTING")
            fault_point("prefill.received")
            call = CALL.from_proto(request)
            check_call(call, self._served)
            if not self._served.info.can_blend:
                call = replace(call, options=replace(call.options, blend=None))
            figures = await traced(self._tracer, call, context.invocation_metadata(), self._jobs.run(call))
            fault_point("prefill.answered")
            return figures_to_proto(figures)
        raise AssertionError("rpc_errors ends the call")


def check_call(call: PrefillCall, served: ServedModel) -> None:
    """Checks the call. Raises: InvalidRequestError, MismatchError."""
    if call.fingerprint != served.info.fingerprint:
        raise MismatchError(
            f"{served.node_name} serves {served.info.name} with fingerprint {served.info.fingerprint}, "
            f"the router asks for fingerprint {call.fingerprint or '(none)'}",
            reason="FINGERPRINT_MISMATCH",
        )
    host, _, port = call.kv_address.rpartition(":")
    num_tokens, max_tokens, vocab_size = len(call.token_ids), served.max_tokens, served.info.vocab_size
    blend = call.options.blend
    for is_valid, field, message in (
        (len(call.transfer_id) == ID_BYTES, "transfer_id", f"must have {ID_BYTES} bytes"),
        (len(call.decode_incarnation) == ID_BYTES, "decode_incarnation", f"must have {ID_BYTES} bytes"),
        (host and port.isdecimal(), "kv_address", f"must be host:port, not {call.kv_address!r}"),
        (1 <= num_tokens <= max_tokens, "token_ids", f"must be 1 to {max_tokens} tokens, not {num_tokens}"),
        (max(call.token_ids, default=0) < vocab_size, "token_ids", f"must be below {vocab_size}"),
        (
            len(call.options.cache_salt) <= MAX_CACHE_SALT_BYTES,
            "cache_salt",
            f"must have at most {MAX_CACHE_SALT_BYTES} bytes",
        ),
        (len(call.scored_token_ids) <= num_tokens, "scored_token_ids", "must not outnumber token_ids"),
        (max(call.scored_token_ids, default=0) < vocab_size, "scored_token_ids", f"must be below {vocab_size}"),
        (
            (call.options.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS,
            "prompt_logprobs",
            f"must be 0 to {MAX_TOP_LOGPROBS}",
        ),
        (blend is None or 0 <= blend.recompute_share <= 1, "blend.recompute_share", "must be 0 to 1"),
        (blend is None or not call.scored_token_ids, "blend", "must not be set with scored_token_ids"),
        (call.held_prefix_length <= num_tokens, "held_prefix_length", f"must be at most {num_tokens}"),
    ):
        if not is_valid:
            raise InvalidRequestError(f"{field} {message}", field=field)


async def traced(
    tracer: Tracer, call: PrefillCall, metadata: Metadata | None, job: Awaitable[PrefillFigures]
) -> PrefillFigures:
    """Awaits the job, and records spans for the call and its push, even if it fails. `metadata`: that of the call."""
    whole = tracer.join("prefill", caller_of_call(metadata))
    if not whole.is_recording():
        return await job
    started_at = time.time_ns()
    figures = PrefillFigures()
    try:
        figures = await job
    except asyncio.CancelledError:  # cancelled by its router, e.g. because the client left
        whole.add_event("cancelled")
        raise
    except BaseException as failure:
        fail(whole, getattr(failure, "reason", type(failure).__name__))
        raise
    else:
        return figures
    finally:
        ended_at = time.time_ns()

        def since_start(seconds: float) -> int:
            return started_at + round(seconds * 1e9)

        whole.set_attributes(
            {
                "gen_ai.request.id": call.request_id,
                "outrider.num_known_tokens": len(call.token_ids),
                "outrider.num_held_tokens": call.held_prefix_length,
                "outrider.num_cached_tokens": figures.num_cached_tokens,
                "outrider.num_computed_tokens": figures.num_computed_tokens,
                "outrider.num_read_tokens": figures.num_read_tokens,
                "outrider.compute_seconds": figures.compute_seconds,
            }
        )
        for chunk in figures.chunks:
            whole.add_event("chunk", {"outrider.num_tokens": chunk.amount}, since_start(chunk.end_seconds))
        if figures.connector:  # empty if the job failed
            pushed_at = since_start(figures.pushed[0].start_seconds) if figures.pushed else ended_at
            push = tracer.child(whole, "kv_push", kind=SpanKind.CLIENT, started_at=pushed_at)
            push.set_attributes(
                {
                    "outrider.connector": figures.connector,
                    "outrider.kv_bytes": figures.kv_bytes,
                    "outrider.exposed_seconds": figures.exposed_seconds,
                }
            )
            push.end(ended_at)
        whole.end(ended_at)
