"""The peers that take part: their names on the command line, and their installation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peer import Peer
from peer_ctranslate2 import CTranslate2
from peer_gguf_library import GgufLibrary
from peer_llama_cpp import CompiledServer, WheelServer
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
    "llama_cpp": (CompiledServer,),
    "xllamacpp": (WheelServer,),
    "ik_llama_cpp": (lambda: GgufLibrary("ik_llama_cpp", "ik-llama-cpp-python==0.1.5"),),
    "openvino": (OpenVino,),
    "ctranslate2": (CTranslate2,),
    "mistralrs": (lambda: GgufLibrary("mistralrs", "mistralrs==0.9.5"),),
    "transformers": (
        lambda: Transformers("transformers_batching", batching=True),
        lambda: Transformers("transformers_generate", batching=False),
    ),
}
ALL = "all"
FILE_DTYPES = ("gguf", "dequantized")
"""Dtypes of a model that is a GGUF file; no other model has them."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A peer in one dtype."""

    peer: Peer
    dtype: str


def choose(entries: Sequence[str], model: Path) -> list[Contestant]:
    """Returns each peer once for each of its dtypes, without installing it.

    `entries`: each is NAME or NAME:DTYPE, where NAME is a key of PEERS or ALL. Without a dtype, it is "gguf" for a
    GGUF file, and otherwise what the peer measures by default.
    """
    found: dict[tuple[str, str], Contestant] = {}
    for name, _, dtype in (entry.partition(":") for entry in entries):
        for peer in (make() for known in (PEERS if name == ALL else (name,)) for make in PEERS[known]):
            defaults = ("gguf",) if model.is_file() else peer.dtypes(processor_flags())
            for each in (dtype,) if dtype else defaults:
                found.setdefault((peer.name, each), Contestant(peer, each))
    return list(found.values())


def install(
    wanted: Sequence[Contestant], model: Path, *, tell: Callable[[str], None]
) -> tuple[list[Contestant], list[SessionResult]]:
    """Installs contestants. Returns those that can take part, and the failures of the others."""
    installed, failures = [], []
    for contestant in wanted:
        peer, dtype = contestant.peer, contestant.dtype
        tell(f"{peer.name} {dtype}: installing")
        try:
            _check(peer, dtype, model)
            peer.install(model, dtype)
            installed.append(contestant)
        except (PeerError, OSError) as error:
            failed = SessionResult(peer=peer.name, dtype=dtype, speculation=False, round=0, error=str(error))
            failures.append(failed)
    return installed, failures


def _check(peer: Peer, dtype: str, model: Path) -> None:
    """Raises: PeerError if the peer cannot compute the model in the dtype."""
    if dtype not in peer.all_dtypes:
        raise PeerError(f"{dtype} is none of its dtypes, {', '.join(peer.all_dtypes)}")
    if model.is_file() != (dtype in FILE_DTYPES):
        raise PeerError(
            f"{model.name} is {'a GGUF file' if model.is_file() else 'no GGUF file'}, so {dtype} is not possible"
        )
