"""A stand-in for any of the four roles, run as `python role_process.py ROLE …`: no model, but a real life cycle.

As a router it answers with the words of the prompt. `ROLE_FAILS=decode_node` makes that role's start fail, and
`ROLE_BREAKS` makes it fail with an unexpected error. `ROLE_ENDS=decode_node` ends its process with the exit status
`ROLE_STATUS`, or by a signal if that is negative. `ROLE_FLOODS=decode_node` writes 32 MiB of log before it serves, and
`ROLE_REFUSES=router` refuses its first prefill node. With `START_WHEN`, every start waits until that file exists. With
`ECHO_TOKENIZER`, a folder, a router has the service that the OpenAI gateway calls, and tells it the folder's path as
`ECHO_TOKENIZER_SHOWN`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.config.settings import setting
from outrider.errors import CapacityError, InvalidRequestError, ModelError
from outrider.service.announce import announce, announce_progress
from outrider.service.config import SERVICE_SECTIONS
from outrider.service.rpc_errors import rpc_errors
from outrider.service.server import ServiceProcess
from outrider.v1 import router_pb2, router_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    proposer: str = setting("ngram")
    local_lookup: str = setting("ngram")
    num_speculative_tokens: int = setting(5, at_least=0)
    draft_targets: tuple[str, ...] = setting(())
    decode_targets: tuple[str, ...] = setting(())
    prefill_targets: tuple[str, ...] = setting(())


class EchoRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, config: RoleConfig) -> None:
        self._config = config

    async def Generate(self, request, context):
        async with rpc_errors(context):
            if request.text == "":
                raise InvalidRequestError("the prompt is empty", field="text")
            if request.text == "full":
                raise CapacityError("too many requests wait", retry_after_seconds=0.25)
        yield router_pb2.GenerateResponse(
            request_id="r1", started=router_pb2.Started(num_prompt_tokens=4, seed=7, model="echo", router="router")
        )
        words = request.text.split(" ")
        for index, word in enumerate(words):
            text = word if index == 0 else f" {word}"
            delta = router_pb2.Delta(start_position=4 + index, token_ids=[100 + index], text=text)
            yield router_pb2.GenerateResponse(delta=delta)
        if request.text == "forever":
            await asyncio.Event().wait()
        finished = router_pb2.Finished(reason=router_pb2.FINISH_REASON_STOP, stop_token_id=2)
        yield router_pb2.GenerateResponse(finished=finished)
        usage = router_pb2.Usage(num_prompt_tokens=4, num_generated_tokens=len(words))
        summary = router_pb2.Summary(usage=usage, metrics=router_pb2.RequestMetrics(attempts=1))
        yield router_pb2.GenerateResponse(request_id="r1", summary=summary)

    async def GetModel(self, request, context):
        return router_pb2.GetModelResponse(name="echo", proposer=",".join(self._config.decode_targets))


def may_start() -> bool:
    return Path(os.environ.get("START_WHEN", "/")).exists()


def choose_refused(targets: Sequence[str]) -> str:
    """Returns the first target, or the second one if another router has refused the first."""
    if len(targets) == 1:
        return targets[0]
    marker = Path(os.environ["START_WHEN"] + ".refused")
    is_refused = marker.exists()
    marker.touch()
    return targets[is_refused]


class RoleService:
    def __init__(self, role: str, config: RoleConfig) -> None:
        self._role = role
        self._config = config
        self.service_names = ("outrider.v1.RouterService",) if role == "router" else ()

    def add_to(self, server) -> None:
        if self._role == "router":
            router_pb2_grpc.add_RouterServiceServicer_to_server(EchoRouter(self._config), server)
            if folder := os.environ.get("ECHO_TOKENIZER"):
                from echo_engine import EchoEngine  # beside this file

                EchoEngine(Path(folder), os.environ.get("ECHO_TOKENIZER_SHOWN", folder)).add_to(server)

    async def start(self, address: str) -> None:
        if self._role in os.environ.get("ROLE_FAILS", ""):
            raise ModelError("weights.safetensors is not there")
        if self._role in os.environ.get("ROLE_BREAKS", ""):
            prompt = "a long value " * 10_000
            assert not prompt, "angles of positions\nare within a window"
        if self._role in os.environ.get("ROLE_ENDS", ""):
            status = int(os.environ["ROLE_STATUS"])
            os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
        if self._role in os.environ.get("ROLE_FLOODS", ""):
            for _ in range(128):  # bypasses Python, as libraries in C do
                os.write(2, b"x" * 255 * 1024 + b"\n")
                await asyncio.sleep(0.01)
        if self._role in os.environ.get("ROLE_REFUSES", ""):
            refused = getattr(self._config, os.environ.get("ROLE_REFUSED", "prefill_targets"))
            announce(refused="its dtype is bfloat16", address=choose_refused(refused))
        announce_progress("weights", 10, 10)
        while not may_start():
            await asyncio.sleep(0.01)  # polls

    async def drain(self, deadline_seconds: float) -> None:
        return

    async def stop(self) -> None:
        return

    def describe(self):
        return {
            "threads": 1,
            "numerics": "exact (echo)",
            "kernels": "native kernels: echo",
            "draft_targets": list(self._config.draft_targets),
            "max_running_sequences": 4,
        }


def main() -> int:
    role = sys.argv[1]
    process = ServiceProcess(role, {**SERVICE_SECTIONS, role: RoleConfig}, sys.argv[2:])
    return process.run(RoleService(role, process.sections[role]))


if __name__ == "__main__":
    sys.exit(main())
