"""`python -m decode_node`: builds the node's parts explicitly, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from decode_node.config import MAX_RUNNING, SECTIONS, DecodeNodeConfig
from outrider.engine.device import device_type
from outrider.engine.processor import prepare_environment
from outrider.extras import run_role
from outrider.model_hub.config import ModelConfig
from outrider.rpc.tls import PeerSecurity
from outrider.service.config import ServerConfig

if TYPE_CHECKING:
    from decode_node.node import Build, DecodeParts, Emit

ROLE = "decode_node"


def main(argv: list[str] | None = None) -> int:
    from outrider.service.server import ServiceProcess

    process = ServiceProcess(ROLE, SECTIONS, argv)
    sections = process.sections
    prepare_environment(sections["model"].cpus)
    # Imported after the arguments are parsed, so that --help and a bad setting do not wait for torch.
    from decode_node.node import DecodeNode

    config: DecodeNodeConfig = replace(
        sections[ROLE], kv_cache=sections["kv_cache"], kv_transfer=sections["kv_transfer"]
    )
    node = DecodeNode(
        build=make_build(config, sections["model"], process.config, process.security),
        configured_name=process.config.name,
        session_timeout_seconds=config.session_timeout_seconds,
        tracer=process.tracer,
    )
    return process.run(node)


def make_build(
    config: DecodeNodeConfig, model_config: ModelConfig, server: ServerConfig, security: PeerSecurity
) -> Build:
    """Returns the function that builds the node's parts.

    Building takes a while, so that function is called only after the process has begun to listen.
    """

    def build(incarnation: bytes, name: str, emit: Emit) -> DecodeParts:
        from decode_node.admission import Admission
        from decode_node.commands import TransferCompleted, TransferFailed
        from decode_node.decode_loop import DecodeLoop
        from decode_node.drafting.client import DraftClient
        from decode_node.drafting.feature_plane import FeaturePlane
        from decode_node.drafting.gather import DraftGatherer
        from decode_node.drafting.local_proposers import open_local_head, open_local_proposers
        from decode_node.ingest import Ingest
        from decode_node.kept_answers import KeptAnswers
        from decode_node.node import DecodeParts
        from decode_node.sequence_group_manager import SequenceGroupManager
        from outrider.engine.engine import Engine
        from outrider.engine.graph_shapes import GraphShapes
        from outrider.engine.scheduler import Scheduler
        from outrider.engine.step_profiler import StepProfiler
        from outrider.engine_node import end_process, event_loop_clock, open_logged_turns
        from outrider.heads.of_target import TargetHead
        from outrider.kv_transfer.cuda_ipc import open_shared_gpu
        from outrider.kv_transfer.receiver import KvReceiver
        from outrider.model_hub.compute import open_model_runtime
        from outrider.service.announce import announce_progress
        from outrider.speculation.draft_controller import DraftController
        from outrider.speculation.draft_stream import DraftHello
        from outrider.speculation.step_cost import StepCostModel
        from outrider.speculation.verify.by_request import RequestVerifier

        proposers, head_of_target = open_local_proposers(config), TargetHead(model_config)
        compute = open_model_runtime(
            model_config,
            config.kv_cache,
            max_rows_per_step=config.max_rows_per_step,
            graphs=GraphShapes(config.max_rows_per_step, has_trees=config.draft_trees),
            main_memory_bytes=sum(proposer.info.memory_bytes for proposer in proposers),
            features=head_of_target.reduction,
            on_rank_lost=end_process,
            progress=announce_progress,
        )
        model, kv_cache, runner = compute.model, compute.kv_cache, compute.runner
        head, features_of = open_local_head(config, head_of_target, model, kv_cache)
        proposers += [head] if head else []
        info = replace(
            model.info,
            proposer=head.info.name if head else config.local_lookup,
            num_speculative_tokens=config.num_speculative_tokens,
        )
        pool = compute.make_pool(config.kv_cache)
        max_running = config.max_running_sequences or MAX_RUNNING[device_type(model.device)]
        scheduler = Scheduler(pool, max_running=max_running, max_rows_per_step=config.max_rows_per_step)
        sampler = model.open_sampler()
        engine = Engine(pool, scheduler, kv_cache, runner, sampler, find_adapter=compute.adapters.find)
        kv_host = config.kv_transfer.host or server.host
        ingest = Ingest(
            KvReceiver(
                incarnation=incarnation,
                host=kv_host,
                port=config.kv_transfer.port,
                connectors=config.kv_transfer.accepted,
                on_complete=lambda transfer_id, stats: loop.submit(TransferCompleted(transfer_id, stats)),
                on_failed=lambda transfer_id, reason: loop.submit(TransferFailed(transfer_id, reason)),
                gpu=open_shared_gpu(kv_cache.copies, config.kv_transfer),
                security=security,
            ),
            kv_cache,
            host=kv_host,
            advertise_address="" if config.kv_transfer.host else server.advertise_address,
            security=security,
        )
        client = (
            DraftClient(
                config.draft_targets,
                DraftHello(
                    incarnation=incarnation,
                    name=name,
                    vocab_size=info.vocab_size,
                    vocabulary_fingerprint=info.vocabulary_fingerprint,
                    max_model_len=info.max_model_len,
                    features=info.features,
                ),
                resolve_interval_seconds=config.resolve_interval_seconds,
                open_channel=security.open_channel,
                features=None if model.spec.features is None else FeaturePlane(kv_cache, model.spec.features, ingest),
            )
            if config.draft_targets
            else None
        )
        drafts = DraftGatherer(
            client=client,
            proposers=proposers,
            controller=DraftController(
                num_speculative_tokens=config.num_speculative_tokens,
                cost=StepCostModel(buckets=runner.padded_rows),
                verifies_all=config.draft_rows == "all",
            ),
            max_wait_seconds=config.draft_wait_seconds,
            takes_trees=config.draft_trees,
            features_of=features_of,
            loop_clock=event_loop_clock() if client is not None and not runner.is_asynchronous else None,
        )
        kept_answers = None
        if config.keep_answers:
            kept_answers = KeptAnswers(config.keep_answers, max_bytes=config.keep_answers_bytes)
        groups = SequenceGroupManager(
            engine=engine,
            drafts=drafts,
            ingest=ingest,
            admission=Admission(
                pool,
                max_running_sequences=max_running,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
            ),
            max_local_prefill_tokens=config.max_local_prefill_tokens,
            transfer_timeout_seconds=config.transfer_timeout_seconds,
            kept_answers=kept_answers,
        )
        cpu_turns = open_logged_turns(model_config.turns_file, model.cpu_kernels)
        loop = DecodeLoop(
            engine=engine,
            drafts=drafts,
            groups=groups,
            profiler=StepProfiler(
                engine.clock,
                runner.phases,
                planes=kv_cache.planes,
                weights=model.info.weights,
                read_event_loop=event_loop_clock(),
            ),
            verifier=RequestVerifier(sampler),
            emit=emit,
            cpu_turns=cpu_turns,
        )
        return DecodeParts(
            engine=engine,
            loop=loop,
            groups=groups,
            ingest=ingest,
            drafts=client,
            model=info,
            tokenizer_files=model.tokenizer_files,
            ranks=compute.ranks,
            adapters=compute.adapters,
            description={
                **compute.describe(model_config, cpu_turns=cpu_turns),
                "draft_targets": list(config.draft_targets),
                "proposer": info.proposer,
                "host_memory": str(pool.host.price) if pool.host else "none",
                "max_running_sequences": max_running,
            },
        )

    return build


if __name__ == "__main__":
    run_role(ROLE, main)
