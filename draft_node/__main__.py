"""Runs a draft node: `python -m draft_node --help`."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.extras import run_role


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a drain."""
    from prometheus_client import REGISTRY

    from draft_node.config import SECTIONS, DraftNodeConfig
    from draft_node.held_sequences import max_held_bytes
    from draft_node.node import DraftNode
    from outrider.engine.processor import prepare_environment
    from outrider.service.announce import announce_progress
    from outrider.service.server import ServiceProcess
    from outrider.speculation.proposers.factory import ProposerSettings, make_proposer

    process = ServiceProcess("draft_node", SECTIONS, argv)
    sections = process.sections
    config: DraftNodeConfig = sections["draft_node"]
    prepare_environment(sections["model"].cpus)
    settings = ProposerSettings(
        remembered_tokens=config.remembered_tokens,
        model=config.draft_model(sections["model"]),
        kv_cache=sections["kv_cache"],
        other_memory_bytes=max_held_bytes(has_head=config.proposer == "head"),
    )
    service = DraftNode(
        config,
        lambda: make_proposer(config.proposer, settings, progress=announce_progress),
        name=process.config.name,
        registry=REGISTRY,
        tracer=process.tracer,
        security=process.security,
    )
    return process.run(service)


if __name__ == "__main__":
    run_role("draft_node", main)
