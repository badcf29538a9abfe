"""OpenVINO GenAI's continuous batching. Its KV cache has 8 bits per element, OpenVINO's default.

With int8 and int4, weights are exported in that many bits, and OpenVINO chooses how it computes with them.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path

from environment import Environment
from peer import Setup, Started, line_server

REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
WITHOUT = ("torchvision",)
"""Packages to uninstall. Text models do not need them, and builds for another version of torch make the export fail."""
SCRIPT = Path(__file__).resolve().parent / "serve_openvino.py"
WEIGHTS = {
    "int8": ("int8",),
    # By default some layers stay in 8 bits, and a group has 128 weights, which does not divide every model's width.
    "int4": ("int4", "--ratio", "1.0", "--group-size", "64"),
}
"""Arguments of `--weight-format` for the dtypes of weights. With the others, weights are exported in 16 bits."""


class OpenVino:
    name = "openvino"
    has_lookup = True
    max_clients = 0
    all_dtypes = ("bfloat16", "float32", "auto", *WEIGHTS)

    def __init__(self) -> None:
        self._environment = Environment("openvino")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        """Returns the dtype that OpenVINO would choose: bfloat16 if the processor computes in it, otherwise float32."""
        return ("bfloat16",) if "avx512_bf16" in cpu_flags else ("float32",)

    def install(self, model: Path, dtype: str) -> None:
        self._environment.install(REQUIREMENTS, without=WITHOUT)
        exported = self._exported(model, dtype)
        if (exported / "openvino_tokenizer.xml").exists():  # an export writes this file last
            return
        shutil.rmtree(exported, ignore_errors=True)
        command = [str(self._environment.directory / "bin" / "optimum-cli"), "export", "openvino"]
        command += ["--model", str(model), "--task", "text-generation-with-past"]
        command += ["--weight-format", *WEIGHTS.get(dtype, ("fp16",)), str(exported)]
        self._environment.run(*command, HF_HUB_OFFLINE="1")

    @contextmanager
    def start(self, setup: Setup) -> Started:
        command = [str(self._environment.python), str(SCRIPT), str(self._exported(setup.model, setup.dtype))]
        with line_server(command, setup, dtype="auto" if setup.dtype in WEIGHTS else setup.dtype) as server:
            yield server

    def _exported(self, model: Path, dtype: str) -> Path:
        name = f"{model.name}-{dtype}" if dtype in WEIGHTS else model.name
        return self._environment.directory / "models" / name
