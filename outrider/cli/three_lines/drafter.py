"""A draft node with a simulated model, as a process: `python -m outrider.cli.three_lines.drafter NOISE SIMULATION`.

Serves on a port of 127.0.0.1, which is its first line, until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace

import grpc.aio
from prometheus_client import CollectorRegistry

from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.cli.three_lines.simulation import Simulation, simulated_drafter
from outrider.request import SamplingParams
from outrider.rpc.channels import server_options
from outrider.speculation.draft_stream import SequenceStart
from outrider.speculation.proposers.base import Progress, ProposalRequest
from outrider.speculation.proposers.draft_model import DraftModelProposer


async def serve(simulation: Simulation, *, noise: float) -> None:
    config = DraftNodeConfig(num_speculative_tokens=simulation.num_speculative_tokens)
    proposer = simulated_drafter(simulation, noise=noise)
    warm_up(proposer)
    node = DraftNode(config, registry=CollectorRegistry(), proposer=proposer)
    server = grpc.aio.server(options=server_options())
    node.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await node.start(f"127.0.0.1:{port}")
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await node.stop()


def warm_up(proposer: DraftModelProposer) -> None:
    """The first forwards of a process are slow, which a breaker would remember for a second."""
    start = SequenceStart(params=SamplingParams(seed=0, max_tokens=64), sample=0, prompt_length=4)
    request = ProposalRequest(0, (1, 2, 3, 4), 8, start, max_alternatives=4)
    while proposer.propose([request])[0].progress is not Progress.DONE:
        continue
    while proposer.propose([replace(request, looks_ahead=True)])[0].may_go_on:
        continue
    proposer.forget(0)


if __name__ == "__main__":
    asyncio.run(serve(Simulation(**json.loads(sys.argv[2])), noise=float(sys.argv[1])))
