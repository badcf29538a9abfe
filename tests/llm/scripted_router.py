"""A fake router for `LLM`: a token is a character, and an answer is its prompt in capitals."""

from __future__ import annotations

import threading

import grpc

from outrider.errors import CapacityError, InvalidRequestError
from outrider.v1 import router_pb2, router_pb2_grpc
from tests.client.answering_router import fail

WINDOW = 100
WAIT_SECONDS = 60.0


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Refuses the first `full` calls for lack of room. A prompt "hold" waits until its call ends."""

    def __init__(self) -> None:
        self.full = 0
        self.requests = []  # Complete's requests, in order
        self.loaded = []  # (name, directory) of each LoadAdapter
        self.adapters = {}  # by name
        self.load_seconds = 0.0  # until the last one's deadline
        self.num_now = 0
        self.max_concurrent = 0
        self.num_held = 0
        self._changed = threading.Condition()

    def wait_held(self, number):
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_held == number, WAIT_SECONDS)

    def GetModel(self, request, context):
        return router_pb2.GetModelResponse(name="scripted", max_model_len=WINDOW, adapters=self.adapters.values())

    def LoadAdapter(self, request, context):
        self.loaded.append((request.name, request.directory))
        self.load_seconds = context.time_remaining()
        if "none" in request.directory:
            fail(context, InvalidRequestError("decode-0: none is no adapter", field="directory"))
        adapter = self.adapters[request.name] = router_pb2.Adapter(name=request.name, fingerprint="f" * 64)
        return router_pb2.LoadAdapterResponse(adapter=adapter)

    def Tokenize(self, request, context):
        self._refuse_while_full(context)
        text = request.text
        if request.HasField("chat"):
            text = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
            text += "<assistant>" if request.chat.add_generation_prompt else ""
        return router_pb2.TokenizeResponse(token_ids=list(map(ord, text)))

    def Detokenize(self, request, context):
        return router_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def Complete(self, request, context):
        self._refuse_while_full(context)
        with self._changed:
            self.requests.append(request)
            self.num_now += 1
            self.max_concurrent = max(self.max_concurrent, self.num_now)
        try:
            return self._complete(request, context)
        finally:
            with self._changed:
                self.num_now -= 1

    def _complete(self, request, context):
        if request.sampling.temperature < 0:
            fail(context, InvalidRequestError("temperature is at least 0", field="sampling.temperature"))
        prompt = "".join(map(chr, request.token_ids.ids))
        if prompt == "hold":
            self._hold(context)
        token_ids = list(map(ord, prompt.upper()))[: request.sampling.max_tokens]
        response = router_pb2.CompleteResponse(request_id=request.request_id)
        response.started.seed = request.sampling.seed
        if request.output.HasField("prompt_logprobs"):
            logprobs = [logprobs_of(token_id, 1) for token_id in request.token_ids.ids]
            logprobs[0].ClearField("logprob")
            response.started.prompt_logprobs.extend(logprobs)
        for sample in range(request.sampling.n):
            completion = response.completions.add(text="".join(map(chr, token_ids)), token_ids=token_ids)
            if request.output.HasField("top_logprobs"):
                completion.logprobs.extend(logprobs_of(token_id, 2) for token_id in token_ids)
            completion.finished.CopyFrom(finish_of(request, token_ids))
            completion.finished.sample = sample
        response.summary.usage.num_cached_tokens = 1
        response.summary.metrics.speculative_decoding.num_spec_steps = 2
        response.summary.metrics.speculative_decoding.num_accepted_draft_tokens = 3
        return response

    def _hold(self, context):
        ended = threading.Event()
        if context.add_callback(ended.set):
            with self._changed:
                self.num_held += 1
                self._changed.notify_all()
            assert ended.wait(WAIT_SECONDS)
            with self._changed:
                self.num_held -= 1
                self._changed.notify_all()
        context.abort(grpc.StatusCode.CANCELLED, "its client has gone")

    def _refuse_while_full(self, context):
        with self._changed:
            self.full, is_full = max(self.full - 1, 0), self.full > 0
        if is_full:
            fail(context, CapacityError("no room", retry_after_seconds=0.0))


def logprobs_of(token_id, rank):
    """Returns logprobs of a token that has this rank, 1 or 2."""
    top = [(token_id, -0.5), (1, -1.5)] if rank == 1 else [(1, -0.25), (token_id, -1.0)]
    own = dict(top)[token_id]
    entries = [router_pb2.TokenLogprob(token_id=entry, logprob=logprob) for entry, logprob in top]
    return router_pb2.TokenLogprobs(token_id=token_id, logprob=own, rank=rank, top=entries)


def finish_of(request, token_ids):
    """Returns why an answer ends: max_tokens, the request's first stop condition, or the model's own end-of-text."""
    if len(token_ids) == request.sampling.max_tokens:
        return router_pb2.Finished(reason=router_pb2.FINISH_REASON_LENGTH)
    if request.stop.strings:
        return router_pb2.Finished(reason=router_pb2.FINISH_REASON_STOP, stop_string=request.stop.strings[0])
    return router_pb2.Finished(reason=router_pb2.FINISH_REASON_STOP, stop_token_id=[*request.stop.token_ids, 2][0])
