"""The peers that take part: their names on the command line, and their installation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer import Peer
from peer_llama_cpp import LlamaCpp
from peer_openvino import OpenVino
from peer_ours import Ours
from peer_transformers import Transformers
from peer_vllm import Vllm
from process import PeerError
from session import SessionResult

from outrider.engine.cpu_kernels.paths import processor_flags

PEERS: dict[str, Sequence[Callable[[], Peer]]] = {
    "ours": (Ours,),
    "vllm": (Vllm,),
    "llama_cpp": (LlamaCpp,),
    "openvino": (OpenVino,),
    "transformers": (
        lambda: Transformers("transformers_batching", batching=True),
        lambda: Transformers("transformers_generate", batching=False),
    ),
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A peer in one dtype."""

    peer: Peer
    dtype: str


def install(
    names: Sequence[str], model: Path, *, tell: Callable[[str], None]
) -> tuple[list[Contestant], list[SessionResult]]:
    """Installs peers. Returns those that can take part, and the failures of the others.

    `names`: each is NAME or NAME:DTYPE, where NAME is a key of PEERS.
    """
    contestants, failures = [], []
    for name, _, dtype in (entry.partition(":") for entry in names):
        for make in PEERS[name]:
            peer = make()
            dtypes = (dtype,) if dtype else peer.dtypes(processor_flags())
            tell(f"{peer.name}: installing")
            try:
                peer.install(model)
                contestants += [Contestant(peer, each) for each in dtypes]
            except (PeerError, OSError) as error:
                for each in dtypes:
                    failed = SessionResult(peer=peer.name, dtype=each, speculation=False, round=0, error=str(error))
                    failures.append(failed)
    return contestants, failures
