"""mistral.rs from its wheel, with GGUF files. It takes texts and returns texts, so its token ids are not known."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from environment import Environment
from gguf_files import GGUF_DTYPES, LlamaCpp, gguf_file
from peer import Setup, Started, line_server, native_dtypes

WHEEL = "mistralrs==0.9.5"
SCRIPT = Path(__file__).resolve().parent / "serve_mistralrs.py"


class MistralRs:
    name = "mistralrs"
    has_lookup = False
    max_clients = 0
    all_dtypes = GGUF_DTYPES

    def __init__(self) -> None:
        self._environment = Environment("mistralrs")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return native_dtypes(cpu_flags)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install((WHEEL,))
        LlamaCpp().make_gguf(model, dtype)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [str(self._environment.python), str(SCRIPT), str(gguf_file(setup.model, setup.dtype))]
        threads = {"RAYON_NUM_THREADS": str(setup.num_threads)}
        with line_server(command, setup, HF_HUB_OFFLINE="1", **threads) as server:
            yield server
