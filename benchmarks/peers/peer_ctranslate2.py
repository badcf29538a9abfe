"""CTranslate2, whose wheels compute Llama models in float32 and in 8 bits, and in bfloat16 on some processors."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from environment import Environment, borrowed_packages
from peer import Setup, Started, line_server

WHEEL = "ctranslate2==4.8.5"
SCRIPT = Path(__file__).resolve().parent / "serve_ctranslate2.py"


class CTranslate2:
    """Its dtypes are CTranslate2's own names of quantisations."""

    name = "ctranslate2"
    has_lookup = False
    max_clients = 0
    all_dtypes = ("float32", "bfloat16", "int8", "int8_bfloat16")

    def __init__(self) -> None:
        self._environment = Environment("ctranslate2")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        return ("float32",)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install((WHEEL,))
        target = self._converted(model, dtype)
        if not target.exists():
            unfinished = target.with_name(f"{target.name}.part")
            command = [str(self._environment.python), "-m", "ctranslate2.converters.transformers"]
            command += ["--model", str(model), "--output_dir", str(unfinished), "--quantization", dtype, "--force"]
            self._environment.run(*command, **borrowed_packages())
            unfinished.rename(target)

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [str(self._environment.python), str(SCRIPT), str(self._converted(setup.model, setup.dtype))]
        with line_server(command, setup, dtype=setup.dtype) as server:
            yield server

    def _converted(self, model: Path, dtype: str) -> Path:
        return self._environment.directory / "models" / f"{model.name}-{dtype}"
