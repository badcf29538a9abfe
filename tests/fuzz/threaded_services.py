"""Services of nodes on an event loop in a thread, and the longest stall of that loop."""

from __future__ import annotations

from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry

from decode_node.commands import RouterCommand
from decode_node.sessions import Sessions
from draft_node.config import DraftNodeConfig
from draft_node.node import DraftNode
from outrider.node import ModelInfo, NodeInfo, NodeReport, NodeRole, NodeState
from outrider.prefill import PrefillFigures
from outrider.profile import Captured, Profile, StartProfile
from outrider.service.config import ServerConfig
from outrider.service.health import HEALTH_SERVICE, Health
from outrider.service.node_service import NodeServicer
from outrider.service.profiling import ProfileDesk
from outrider.service.reflection import add_reflection
from outrider.service.server import make_server
from outrider.session import Rejected, RejectReason
from outrider.speculation.proposers.ngram import NgramProposer
from outrider.v1 import node_pb2_grpc, prefill_pb2_grpc, session_pb2_grpc
from prefill_node.jobs import JobEnded, PrefillJob
from prefill_node.servicer import PendingJobs, PrefillServicer, ServedModel
from tests.support.fake_head import FakeHead
from tests.support.loop_thread import CALL_SECONDS, WatchedLoop

MODEL = ModelInfo(
    name="m",
    vocab_size=100,
    max_model_len=200,
    eos_token_ids=(),
    dtype="float32",
    fingerprint="f",
    vocabulary_fingerprint="v",
)
INFO = NodeInfo(
    incarnation=bytes(16), name="node", role=NodeRole.DECODE, state=NodeState.SERVING, version="0", model=MODEL
)
MAX_PROMPT_TOKENS = 150


class ThreadedServices(WatchedLoop):
    """Services of a decode node and a prefill node whose engines answer at once, and a real draft node."""

    def __init__(self):
        super().__init__()
        self._servers = []
        self.failures = []  # failures of the draft loop
        self.run(self._start())
        self.longest_stall_seconds = 0.0  # the start of the services does not count

    def stop(self):
        self.channel.close()
        self.draft_channel.close()
        self.run(self._stop())
        super().stop()

    def call(self, method, messages, *, timeout=CALL_SECONDS, num_answers=None):
        """Sends these bytes, cancels the call after `num_answers` answers, and returns (status, answers)."""
        channel = self.draft_channel if "DraftService" in method else self.channel
        call = channel.stream_stream(method)(iter(messages), timeout=timeout)
        answers = []
        try:
            for answer in call:
                answers.append(answer)
                if len(answers) == num_answers:
                    call.cancel()
                    return grpc.StatusCode.OK, answers
        except grpc.RpcError as error:
            return error.code(), answers
        return grpc.StatusCode.OK, answers

    async def _start(self):
        report = NodeReport(state=NodeState.SERVING, incarnation=bytes(16))
        self.sessions = Sessions(
            submit=self._refuse,
            has_room=lambda _: True,
            info=lambda: INFO,
            report=lambda: report,
            timeout_seconds=CALL_SECONDS,
        )
        self.sessions.is_open = True
        self.jobs = PendingJobs(submit=self._answer, max_jobs=8)
        prefill = PrefillServicer()
        prefill.serve(self.jobs, ServedModel(node_name="prefill", info=MODEL, max_tokens=MAX_PROMPT_TOKENS))
        profiles = ProfileDesk(can_be_traced=lambda: True, node_name=lambda: "node", submit=self._profile)
        server = make_server(ServerConfig())
        session_pb2_grpc.add_DecodeServiceServicer_to_server(self.sessions, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
        node = NodeServicer(lambda: INFO, lambda: report, lambda: {"tokenizer.json": b"{}"}, profiles)
        node_pb2_grpc.add_NodeServiceServicer_to_server(node, server)
        health = Health(("outrider.v1.DecodeService",))
        await health.add_to(server)
        await health.set_serving(is_serving=True)
        add_reflection(server, ("outrider.v1.DecodeService", HEALTH_SERVICE))
        self.draft = DraftNode(
            DraftNodeConfig(), _make_proposer, registry=CollectorRegistry(), on_loop_failure=self.failures.append
        )
        draft_server = make_server(ServerConfig())
        self.draft.add_to(draft_server)
        self.channel = await self._listen(server)
        self.draft_channel = await self._listen(draft_server)
        await self.draft.start("127.0.0.1:1")

    async def _listen(self, server):
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])

    async def _stop(self):
        for server in self._servers:
            await server.stop(0)
        await self.draft.stop()

    def _refuse(self, command):
        if isinstance(command, RouterCommand):
            group_id = command.message.sequence_group_id
            refusal = Rejected(sequence_group_id=group_id, reason=RejectReason.NO_ROOM, message="no room")
            self.sessions.deliver({command.session_id: [refusal]})

    def _answer(self, command):
        if isinstance(command, PrefillJob):
            call = command.call
            assert 1 <= len(call.token_ids) <= MAX_PROMPT_TOKENS
            assert max(call.token_ids) < MODEL.vocab_size
            assert 0 <= call.held_prefix_length <= len(call.token_ids)
            self.loop.call_soon(self.jobs.deliver, [JobEnded(command.job_id, PrefillFigures())])

    def _profile(self, command):
        if isinstance(command, StartProfile):
            command.capture.on_done(Captured(Profile()))


def _make_proposer():
    """Makes a proposer that needs features, takes any bytes for them, and accepts any tokens."""
    proposer = NgramProposer()
    proposer.info = replace(proposer.info, features=FakeHead([]).info.features)
    return proposer
