"""A fake router that can resume answers, since its tokens depend only on seed, sample and position.

Requests are files in a directory, which several such routers may share. As a program:
`python -m tests.client.answering_router DIRECTORY PORT HELD_AT`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc

from outrider.errors import AbortedError, AlreadyRunningError, MismatchError, NotFoundError, PeerLostError
from outrider.rpc.status import DETAILS_KEY, status_code, to_status
from outrider.v1 import router_pb2, router_pb2_grpc

NUM_PROMPT_TOKENS = 3
NUM_TOKENS = 40
TOKENS_PER_DELTA = 2
PROMPT_LOGPROBS = [
    router_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5 * token_id if token_id else None)
    for token_id in range(NUM_PROMPT_TOKENS)
]
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.002


def token_at(seed, sample, position):
    return (seed * 7919 + sample * 104_729 + position * 31) % 50_000


def answer(seed, *, n=1, starts=None):
    """Yields Deltas of two tokens, the held-back text and Finished. `starts`: first positions by sample, by default the
    prompt's end.
    """
    starts = starts or {}
    end = NUM_PROMPT_TOKENS + NUM_TOKENS
    by_sample = []
    for sample in range(n):
        first = starts.get(sample, NUM_PROMPT_TOKENS)
        deltas = []
        for position in range(first, end, TOKENS_PER_DELTA):
            ids = [token_at(seed, sample, at) for at in range(position, min(position + TOKENS_PER_DELTA, end))]
            deltas.append(delta(sample, position, ids, "".join(f" {token}" for token in ids)))
        deltas.append(delta(sample, end, [], " held back"))
        finished = router_pb2.Finished(sample=sample, reason=router_pb2.FINISH_REASON_LENGTH)
        by_sample.append([*deltas, router_pb2.GenerateResponse(finished=finished)])
    for messages in itertools.zip_longest(*by_sample):
        yield from (message for message in messages if message is not None)


def delta(sample, position, token_ids, text):
    return router_pb2.GenerateResponse(
        delta=router_pb2.Delta(sample=sample, start_position=position, token_ids=token_ids, text=text)
    )


class AnsweringRouter(router_pb2_grpc.RouterServiceServicer):
    """A router that follows a script.

    `faults`: for each of the next calls: the number of messages before UNAVAILABLE, an error, or None for no fault.
    `held_at`: the number of messages after which a Generate waits until its call ends or another stream takes over.
    """

    def __init__(self, directory: Path, *, held_at: int | None = None) -> None:
        self.directory = directory
        self.held_at = held_at
        self.adapter_fingerprint = ""  # of the adapter that answers
        self.faults = []
        self.calls = []  # (method, request)
        self.seconds_left = []  # of each call, until its deadline
        self.aborted = []
        self._attached = {}  # by request id: the number of the stream that has the answer
        self._numbers = itertools.count()

    def Generate(self, request, context):
        fault = self._begin("Generate", request, context)
        if request.adapter_fingerprint not in ("", self.adapter_fingerprint):
            fail(context, MismatchError("another adapter", reason="ADAPTER_MISMATCH"))
        path = self.directory / request.request_id
        if path.exists():
            fail(context, AlreadyRunningError("running"))
        if not request.sampling.HasField("seed"):
            request.sampling.seed = time.monotonic_ns() % 1000
        path.write_bytes(request.SerializeToString())
        num_brought = len(request.generated_token_ids)
        expected = [token_at(request.sampling.seed, 0, NUM_PROMPT_TOKENS + index) for index in range(num_brought)]
        assert list(request.generated_token_ids) == expected
        if not request.HasField("resume_window"):
            context.add_callback(lambda: path.unlink(missing_ok=True))
        yield from self._stream(request, {0: NUM_PROMPT_TOKENS + num_brought}, fault, context, held_at=self.held_at)

    def Complete(self, request, context):
        self._begin("Complete", request, context)
        return router_pb2.CompleteResponse(completions=[router_pb2.Completion(text="whole")])

    def Resume(self, request, context):
        fault = self._begin("Resume", request, context)
        path = self.directory / request.request_id
        if not path.exists():
            fail(context, NotFoundError(f"no request {request.request_id}"))
        stored = router_pb2.GenerateRequest.FromString(path.read_bytes())
        yield from self._stream(stored, dict(request.next_positions), fault, context)

    def Abort(self, request, context):
        path = self.directory / request.request_id
        is_known = path.exists()
        path.unlink(missing_ok=True)
        if is_known:
            self.aborted.append(request.request_id)
        return router_pb2.AbortResponse(aborted=is_known)

    def GetModel(self, request, context):
        self._begin("GetModel", request, context)
        return router_pb2.GetModelResponse(name="m")

    def LoadAdapter(self, request, context):
        self._begin("LoadAdapter", request, context)
        adapter = router_pb2.Adapter(name=request.name, fingerprint="f" * 64)
        return router_pb2.LoadAdapterResponse(adapter=adapter)

    def store(self, request_id, *, seed=0, n=1):
        """Stores a request, as another router with the same store would."""
        request = router_pb2.GenerateRequest(request_id=request_id)
        request.sampling.seed, request.sampling.n = seed, n
        (self.directory / request_id).write_bytes(request.SerializeToString())

    def methods(self):
        return [method for method, _ in self.calls]

    def _begin(self, method, request, context):
        self.calls.append((method, request))
        self.seconds_left.append(context.time_remaining())
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            fail(context, fault)
        return fault

    def _stream(self, request, starts, num_messages, context, *, held_at=None):
        request_id, seed, n = request.request_id, request.sampling.seed, request.sampling.n or 1
        number = self._attached[request_id] = next(self._numbers)
        fingerprint = self.adapter_fingerprint
        started = router_pb2.Started(num_prompt_tokens=NUM_PROMPT_TOKENS, seed=seed, adapter_fingerprint=fingerprint)
        if request.output.HasField("prompt_logprobs"):
            started.prompt_logprobs.extend(PROMPT_LOGPROBS)
        first = router_pb2.GenerateResponse(request_id=request_id, started=started)
        for num_sent, message in enumerate([first, *answer(seed, n=n, starts=starts)]):
            if num_messages is not None and num_sent == num_messages:
                fail(context, PeerLostError("scripted", retry_after_seconds=0.0))
            while num_sent == held_at and self._attached[request_id] == number and context.is_active():
                time.sleep(POLL_SECONDS)
            if self._attached[request_id] != number:
                fail(context, AbortedError("another stream has the answer"))
            yield message
        num_generated = n * NUM_TOKENS - len(request.generated_token_ids)
        usage = router_pb2.Usage(num_prompt_tokens=NUM_PROMPT_TOKENS, num_generated_tokens=num_generated)
        yield router_pb2.GenerateResponse(request_id=request_id, summary=router_pb2.Summary(usage=usage))


def fail(context, error):
    context.set_trailing_metadata(((DETAILS_KEY, to_status(error).SerializeToString()),))
    context.abort(status_code(error), error.message)


class Serving:
    """Serves a router on a port, with TLS if there are `credentials`. `stop` cancels its calls."""

    def __init__(self, router: router_pb2_grpc.RouterServiceServicer, *, port: int = 0, credentials=None) -> None:
        self.router = router
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, self._server)
        listen = self._server.add_insecure_port
        if credentials is not None:
            listen = functools.partial(self._server.add_secure_port, server_credentials=credentials)
        self.address = f"127.0.0.1:{listen(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        assert self._server.stop(0).wait(WAIT_SECONDS)


if __name__ == "__main__":
    serving = Serving(AnsweringRouter(Path(sys.argv[1]), held_at=int(sys.argv[3])), port=int(sys.argv[2]))
    sys.stdout.write(serving.address + "\n")
    sys.stdout.flush()
    threading.Event().wait()
