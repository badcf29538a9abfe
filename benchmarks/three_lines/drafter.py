"""A draft node as a process: `python -m benchmarks.three_lines.drafter`, with the arguments
`simulated NOISES SIMULATION` or `models SETTINGS`, whose values are JSON.

It prints its port on 127.0.0.1 as its first line, and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.three_lines.simulation import Simulation, simulated_drafter
from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.engine.kv_cache.array_plane import WORDS, Words
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.model_hub.config import ModelConfig
from outrider.node import FeatureFormat
from outrider.request import RequestOptions, SamplingParams
from outrider.rpc.channels import server_options
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest, Proposer
from outrider.speculation.proposers.draft_model import DraftModelProposer
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer


async def serve(config: DraftNodeConfig, proposer: Proposer) -> None:
    node = DraftNode(config, lambda: proposer, registry=CollectorRegistry())
    server = grpc.aio.server(options=server_options())
    node.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await node.start(f"127.0.0.1:{port}")
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await node.stop()


@dataclass(frozen=True, slots=True)
class NoFeatures:
    """Features that are zeros for any text."""

    format: FeatureFormat

    def __len__(self) -> int:
        return 3

    def read(self, start: int, end: int) -> Words:
        return np.zeros((end - start, self.format.width), dtype=WORDS[self.format.dtype])


def warm_up(proposer: DraftModelProposer) -> None:
    """Drafts once, because a process's first forwards are slow and would open a circuit breaker for a second."""
    start = SequenceStart(
        options=RequestOptions(sampling=SamplingParams(seed=0, max_tokens=64)), sample=0, prompt_length=4
    )
    features = None if proposer.info.features is None else NoFeatures(proposer.info.features)
    request = ProposalRequest(0, (1, 2, 3, 4), 8, start, max_alternatives=4, features=features)
    while proposer.propose([request])[0].progress is not Progress.DONE:
        continue
    while proposer.propose([request._replace(looks_ahead=True)])[0].has_more:
        continue
    proposer.forget(0)


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "simulated":
        simulation = Simulation(**json.loads(arguments[2]))
        config = DraftNodeConfig()
        proposer: Proposer = simulated_drafter(simulation, noises=json.loads(arguments[1]))
    else:
        settings = json.loads(arguments[1])
        model, kv_cache = ModelConfig(**settings.pop("model")), KVCacheConfig(**settings.pop("kv_cache"))
        config = DraftNodeConfig(**settings, model=model.head or model.id)
        if model.cpus:
            os.sched_setaffinity(0, model.cpus)
        proposer = make_proposer(config.proposer, ProposerSettings(model=model, kv_cache=kv_cache))
    if isinstance(proposer, DraftModelProposer):
        warm_up(proposer)
    asyncio.run(serve(config, proposer))


if __name__ == "__main__":
    main(sys.argv[1:])
