"""A stand-in for a router's `vllm.grpc.engine.VllmEngine`: it answers with the ids of the prompt."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

CHUNK_BYTES = 64 * 1024
STATUSES = {1000 + code.value[0]: code for code in grpc.StatusCode}
"""gRPC statuses by seed: a request with one of these seeds ends with that status."""


class EchoEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """`folder` has the tokenizer; `shown_path` is the path that the gateway is told for it."""

    def __init__(self, folder: Path, shown_path: str) -> None:
        self._folder = folder
        self._shown_path = shown_path
        self._num_calls = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def HealthCheck(self, request, context):
        return vllm_engine_pb2.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request, context):
        return vllm_engine_pb2.GetModelInfoResponse(
            served_model_name="echo",
            model_path=self._shown_path,
            tokenizer_path=self._shown_path,
            is_generation=True,
            max_context_length=2048,
            vocab_size=320,
            eos_token_ids=[2],
        )

    async def GetTokenizer(self, request, context):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in self._folder.iterdir():
                archive.write(path, path.name)
        content = packed.getvalue()
        for start in range(0, len(content), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(content)
            yield common_pb2.GetTokenizerChunk(
                data=content[start : start + CHUNK_BYTES],
                sha256=hashlib.sha256(content).hexdigest() if is_last else "",
            )

    async def Generate(self, request, context):
        self._num_calls += 1
        if status := STATUSES.get(request.sampling_params.seed):
            await context.abort(status, f"call {self._num_calls}")
        ids = list(request.tokenized.input_ids)
        counts = {"prompt_tokens": len(ids), "completion_tokens": len(ids)}
        if request.stream:
            for token_id in ids:
                chunk = vllm_engine_pb2.GenerateStreamChunk(token_ids=[token_id], **counts)
                yield vllm_engine_pb2.GenerateResponse(chunk=chunk)
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=[] if request.stream else ids, finish_reason="stop", **counts
        )
        yield vllm_engine_pb2.GenerateResponse(complete=complete)

    async def Abort(self, request, context):
        return vllm_engine_pb2.AbortResponse()
