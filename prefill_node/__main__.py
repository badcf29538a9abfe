"""`python -m prefill_node`: builds the node's parts explicitly, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.engine.device import device_type
from outrider.engine.processor import prepare_environment
from outrider.extras import run_role
from outrider.model_hub.config import ModelConfig
from outrider.rpc.tls import PeerSecurity
from prefill_node.config import MAX_RUNNING, SECTIONS, PrefillNodeConfig

if TYPE_CHECKING:
    from prefill_node.node import Build, Emit, PrefillParts

ROLE = "prefill_node"


def main(argv: Sequence[str] | None = None) -> int:
    from outrider.service.server import ServiceProcess

    process = ServiceProcess(ROLE, SECTIONS, argv)
    sections = process.sections
    prepare_environment(sections["model"].cpus)
    # Imported after the arguments are parsed, so that --help and a bad setting do not wait for torch.
    from prefill_node.node import PrefillNode

    config: PrefillNodeConfig = replace(
        sections[ROLE], kv_cache=sections["kv_cache"], kv_transfer=sections["kv_transfer"]
    )
    node = PrefillNode(
        build=make_build(config, sections["model"], process.security),
        configured_name=process.config.name,
        max_jobs=(config.max_running_sequences or max(MAX_RUNNING.values())) + config.max_waiting,
        tracer=process.tracer,
    )
    return process.run(node)


def make_build(config: PrefillNodeConfig, model_config: ModelConfig, security: PeerSecurity) -> Build:
    """Returns the function that builds the node's parts.

    It is called when the process already listens, because loading takes a while.
    """

    def build(emit: Emit) -> PrefillParts:
        from outrider.engine.engine import PromptEngine
        from outrider.engine.graph_shapes import GraphShapes
        from outrider.engine.ranks.sharded_cache import ShardedKVCache
        from outrider.engine.scheduler import Scheduler
        from outrider.engine.step_profiler import StepProfiler
        from outrider.engine_node import end_process, event_loop_clock, open_logged_turns
        from outrider.heads.of_target import TargetHead
        from outrider.kv_transfer.connectors import Connector
        from outrider.kv_transfer.cuda_ipc import open_shared_gpu
        from outrider.model_hub.compute import open_model_runtime
        from outrider.service.announce import announce_progress
        from prefill_node.node import PrefillParts
        from prefill_node.prefill_loop import PrefillLoop
        from prefill_node.rank_push import RankPushes

        compute = open_model_runtime(
            model_config,
            config.kv_cache,
            graphs=GraphShapes(has_logits=False),
            features=TargetHead(model_config).reduction,
            on_rank_lost=end_process,
            progress=announce_progress,
        )
        model, kv_cache, runner = compute.model, compute.kv_cache, compute.runner
        pool = compute.make_pool(config.kv_cache)
        scheduler = Scheduler(
            pool,
            max_running=config.max_running_sequences or MAX_RUNNING[device_type(model.device)],
            max_rows_per_step=compute.max_rows_per_step,
            reserve_blocks_per_running=0,  # prompts do not grow
        )
        connector = Connector(config.kv_transfer, security, gpu=open_shared_gpu(kv_cache.copies, config.kv_transfer))
        if isinstance(kv_cache, ShardedKVCache):
            RankPushes.prepare(kv_cache.ranks, connector)
        cpu_turns = open_logged_turns(model_config.turns_file, model.cpu_kernels)
        engine = PromptEngine(pool, scheduler, kv_cache, runner, find_adapter=compute.adapters.find)
        loop = PrefillLoop(
            engine=engine,
            connector=connector,
            frame_bytes=config.kv_transfer.frame_bytes,
            profiler=StepProfiler(
                engine.clock,
                runner.phases,
                planes=kv_cache.planes,
                weights=model.info.weights,
                read_event_loop=event_loop_clock(),
            ),
            emit=emit,
            cpu_turns=cpu_turns,
        )
        return PrefillParts(
            engine=engine,
            loop=loop,
            connector=connector,
            model=model.info,
            tokenizer_files=model.tokenizer_files,
            ranks=compute.ranks,
            adapters=compute.adapters,
            description={
                **compute.describe(model_config, cpu_turns=cpu_turns),
                "connector": connector.name,
                "host_memory": str(pool.host.price) if pool.host else "none",
            },
        )

    return build


if __name__ == "__main__":
    run_role(ROLE, main)
