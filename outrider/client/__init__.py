"""Clients of a router, synchronous and asynchronous. They import no torch.

    from outrider.client import ChatMessage, Client

    with Client("127.0.0.1:50051") as client:
        with client.generate([ChatMessage("user", "Why is the sky blue?")], max_tokens=64) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.summary.metrics.speculation.mean_acceptance_length)

A prompt is text, token ids, or chat messages. All errors are raised as
`outrider.errors.OutriderError`.
"""

from __future__ import annotations

from outrider.answer import (
    CompleteResult,
    Completion,
    Delta,
    Finished,
    KvTransferMetrics,
    RequestMetrics,
    SpeculationMetrics,
    Started,
    Summary,
    Usage,
)
from outrider.client.aio import AsyncClient, AsyncGenerateStream
from outrider.client.options import ChatOptions, GenerateOptions, Prompt
from outrider.client.retry import RetryPolicy
from outrider.client.sync import Client, GenerateStream
from outrider.node import ClusterStatus, Model, NodeStatus
from outrider.request import ChatMessage
from outrider.rpc.tls import TlsConfig

__all__ = [
    "AsyncClient",
    "AsyncGenerateStream",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "ClusterStatus",
    "CompleteResult",
    "Completion",
    "Delta",
    "Finished",
    "GenerateOptions",
    "GenerateStream",
    "KvTransferMetrics",
    "Model",
    "NodeStatus",
    "Prompt",
    "RequestMetrics",
    "RetryPolicy",
    "SpeculationMetrics",
    "Started",
    "Summary",
    "TlsConfig",
    "Usage",
]
