"""Settings of a local cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.config.settings import setting
from outrider.service.config import ROUTER_PORT
from outrider.speculation.proposers.factory import DRAFT_CHOICES, DraftChoice, parse_draft_choice

DRAFT, PREFILL, DECODE = "draft_node", "prefill_node", "decode_node"
GPU_NAME = re.compile(r"\d+|(GPU|MIG)-\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: which processes `outrider up` starts."""

    prefill_nodes: int = setting(
        1, at_least=0, at_most=64, help="Number of prefill nodes. 0: decode nodes compute prompts as well as answers."
    )
    decode_nodes: int = setting(1, at_least=1, at_most=64, help="Number of decode nodes.")
    draft_nodes: int = setting(1, at_least=0, at_most=64, help="Number of draft nodes.")
    routers: int = setting(
        1, at_least=1, at_most=64, help="Number of routers, on consecutive ports. Several routers share router.store."
    )
    gpus: tuple[str, ...] = setting(
        (),
        help="GPUs for the nodes, in the form of CUDA_VISIBLE_DEVICES, for example 0,1,2. Each node gets a GPU of "
        "its own if there are enough. Empty: all visible GPUs.",
    )
    draft: str = setting("ngram", help=f"What proposes drafts: {', '.join(DRAFT_CHOICES)} (no speculation).")
    port: int = setting(
        ROUTER_PORT, at_least=0, at_most=65535, help="Port of the (first) router. 0: the system chooses."
    )
    openai_port: int | None = setting(
        None,
        at_least=0,
        at_most=65535,
        help="Port on 127.0.0.1 for OpenAI's API over HTTP, served by the SMG gateway (extra openai). 0: the system "
        "chooses. null: no gateway.",
    )

    def __post_init__(self) -> None:
        parse_draft_choice(self.draft)
        if wrong := [name for name in self.gpus if not GPU_NAME.fullmatch(name)]:
            raise ValueError(f"gpus {wrong[0]} is neither a number nor a UUID, such as GPU-… or MIG-…")
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus {','.join(self.gpus)} names one twice")
        if self.port and self.openai_port and self.openai_port - self.port in range(self.routers):
            raise ValueError(f"openai_port {self.openai_port} is the port of a router: choose another")

    @property
    def draft_choice(self) -> DraftChoice:
        """The parsed `draft`."""
        return parse_draft_choice(self.draft)

    @property
    def computing_nodes(self) -> dict[str, str]:
        """The role of each node that has a model, by the node's name, such as "decode-0"."""
        num_drafts = self.draft_nodes if self.draft_choice.model_id else 0  # prompt lookup needs no nodes
        counts = {DECODE: self.decode_nodes, PREFILL: self.prefill_nodes, DRAFT: num_drafts}
        return {name: role for role, count in counts.items() for name in node_names(role, count)}


def node_names(role: str, count: int) -> list[str]:
    """Returns names such as "decode-0"."""
    return [f"{role.removesuffix('_node')}-{index}" for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Timeouts and restart delays. Tests use other values."""

    end_seconds: float = 1.5  # from the end of a process's drain to SIGKILL
    restart_seconds: float = 1.0  # delay before a second restart; doubled for each further one
    max_restart_seconds: float = 30.0
    max_log_bytes: int = 8 << 20  # per process; the same amount of older output is kept in a second file
    stable_seconds: float = 60.0  # after serving for this long, the restart delay is reset

    def restart_delay(self, num_failures: int, *, has_served: bool) -> float:
        """Returns the seconds before a restart after consecutive failures: doubled each time, up to a limit.

        Returns 0 after the first failure of a child that has served, since requests wait for it.
        """
        if num_failures == 0 and has_served:
            return 0.0
        doublings = min(max(num_failures - 1, 0), 64)  # 2.0**1024 would overflow
        return min(self.restart_seconds * 2.0**doublings, self.max_restart_seconds)
