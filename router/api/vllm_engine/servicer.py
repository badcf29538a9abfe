"""READ FIRST. The vLLM engine service: handles a gateway's requests like the router's own, in the engine's messages."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Never

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from outrider import __version__
from outrider.errors import (
    POISON_REQUEST,
    InvalidRequestError,
    MismatchError,
    NotSupportedError,
    OutriderError,
    PeerLostError,
)
from outrider.node import NodeRole
from outrider.service.request_limits import ENGINE_MODEL_KEY
from outrider.service.rpc_errors import Context, rpc_errors
from router.api.registry import RequestRegistry
from router.api.vllm_engine.messages import EngineAnswer, request_from_engine

MAX_ABORTED = 256
"""Maximum number of requests in one Abort. Gateways send one request in each."""
WATCHED_SECONDS = 10.0
"""Seconds for which a gateway is assumed to send requests to the router after its last health check."""
CHUNK_BYTES = 64 << 10
NORMALISING_TEMPLATE = Path(__file__).with_name("messages.jinja").read_bytes()
"""Template that precedes the model's own. It replaces the nulls that the gateway passes for omitted members."""
NO_TOKENIZER_PATH = "/dev/null"
"""A path that exists but is no tokenizer, so that a gateway calls GetTokenizer and does not try a model hub first."""


class VllmEngineServicer:
    """Implements `vllm.grpc.engine.VllmEngine`. The package smg_grpc_proto has its messages, which are untyped."""

    def __init__(self, requests: RequestRegistry, reasoning_parser: str = "") -> None:
        """`reasoning_parser`: the parser of the gateways that call the service."""
        self._requests = requests
        self._reasoning_parser = reasoning_parser
        self._started_at = time.monotonic()
        self._watched_at = -math.inf
        self._tokenizer: list[Any] | None = None  # chunks of the tokenizer's archive; None until one is requested

    @property
    def is_watched(self) -> bool:
        """Whether a gateway has checked the router's health recently, and is therefore assumed to act on the result."""
        return time.monotonic() - self._watched_at < WATCHED_SECONDS

    def add_to(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Context) -> None:  # noqa: N802
        async with rpc_errors(context):
            with self._requests.counting_refusals():
                ours, preface = request_from_engine(request, self._requests.served(), self._reasoning_parser)
                ours.model = _named_model(context)
            async with self._requests.open(ours, context) as live:
                answer = EngineAnswer(ours, is_streamed=request.stream, preface=preface)

                async def write(messages: Sequence[Any]) -> None:
                    for message in messages:
                        await context.write(message)

                try:
                    await live.write(write, answer.render)
                except PeerLostError as error:
                    if error.reason == POISON_REQUEST:  # must not become UNAVAILABLE, which gateways and clients retry
                        raise MismatchError(error.message, reason=error.reason) from error
                    raise

    async def Abort(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Aborts the requests and frees their resources at once. Their streams end with the finish reason "abort"."""
        async with rpc_errors(context):
            if len(request.request_ids) > MAX_ABORTED:
                raise InvalidRequestError(f"request_ids must have at most {MAX_ABORTED} entries", field="request_ids")
            refused: OutriderError | None = None
            for request_id in request.request_ids:
                try:
                    await self._requests.abort(request_id, context)
                except OutriderError as error:  # the other requests are aborted anyway
                    refused = refused or error
            if refused is not None:
                raise refused
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Reports healthy once a model is served, even if all nodes are lost, as requests wait for nodes to return."""
        self._watched_at = time.monotonic()
        async with rpc_errors(context):
            if self._requests.is_handing_over:
                return vllm_engine_pb2.HealthCheckResponse(message="the router is stopping")
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message=f"serves {self._requests.model().name}")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        async with rpc_errors(context):
            info = self._requests.served().info
            return vllm_engine_pb2.GetModelInfoResponse(
                model_path=info.name,
                served_model_name=info.name,
                tokenizer_path=NO_TOKENIZER_PATH,
                is_generation=True,
                max_context_length=info.max_model_len,
                max_req_input_len=info.max_model_len - 1,
                vocab_size=info.vocab_size,
                eos_token_ids=info.eos_token_ids,
            )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:  # noqa: N802
        async with rpc_errors(context):
            return vllm_engine_pb2.GetServerInfoResponse(
                active_requests=self._requests.cluster_status().num_requests_running,
                uptime_seconds=time.monotonic() - self._started_at,
                server_type="outrider",
                model_dtype=self._requests.served().info.dtype,
                data_parallel_size=1,
            )

    async def GetLoads(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Reports the load of the whole cluster as that of one engine."""
        async with rpc_errors(context):
            cluster = self._requests.cluster_status()
            nodes = [node for node in cluster.nodes if node.role is NodeRole.DECODE]
            num_blocks = sum(node.load.kv_blocks_total for node in nodes)
            num_used = num_blocks - sum(node.load.kv_blocks_free for node in nodes)
            load = vllm_engine_pb2.SchedulerLoad(
                num_running_reqs=cluster.num_requests_running,
                num_waiting_reqs=cluster.num_requests_waiting,
                num_total_reqs=cluster.num_requests_running + cluster.num_requests_waiting,
                token_usage=num_used / num_blocks if num_blocks else 0.0,
                gen_throughput=sum(node.load.tokens_per_second for node in nodes),
            )
            return vllm_engine_pb2.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
            )

    async def GetTokenizer(self, request: Any, context: Context) -> None:  # noqa: N802
        async with rpc_errors(context):
            self._requests.charge(context)
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(archive_chunks, self._requests.served().tokenizer_files)
            for chunk in self._tokenizer:
                await context.write(chunk)

    async def _refuse(self, request: Any, context: Context) -> Never:
        async with rpc_errors(context):
            raise NotSupportedError("this engine does not support the call: it only generates text")
        raise AssertionError("the call has ended")

    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _refuse


def _named_model(context: Context) -> str:
    """Returns the model or adapter that the call's metadata name, or "" for none."""
    named = dict(context.invocation_metadata() or ()).get(ENGINE_MODEL_KEY, "")
    return named.decode(errors="replace") if isinstance(named, bytes) else named


def files_for_gateway(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns a copy of the files, changed so that a gateway renders, encodes and decodes as the router does.

    The gateway decodes an answer without its prompt, so its decoder must not drop a leading space.
    """
    changed = dict(files)
    if "chat_template.jinja" in changed:
        changed["chat_template.jinja"] = NORMALISING_TEMPLATE + changed["chat_template.jinja"]
    description = json.loads(changed["tokenizer.json"])
    decoder = description.get("decoder") or {}
    for step in decoder.get("decoders", [decoder]):
        if step.get("type") == "Strip":
            step["start"] = 0
        elif step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
    changed["tokenizer.json"] = json.dumps(description, ensure_ascii=False).encode()
    return changed


def archive_chunks(files: Mapping[str, bytes]) -> list[Any]:
    """Returns an archive as GetTokenizerChunks of at most `CHUNK_BYTES`; the last has the archive's SHA-256 in hex.

    Equal files make equal archives, because entries are sorted and have no times. Call this function in a thread, since
    it compresses some MB.
    """
    files = files_for_gateway(files)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    starts = range(0, len(data), CHUNK_BYTES)
    chunks = [common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES]) for start in starts]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks
