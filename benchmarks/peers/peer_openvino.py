"""OpenVINO GenAI's continuous batching. Its KV cache has 8 bits per element, OpenVINO's default.

With dtype int8, weights are exported in 8 bits, and OpenVINO chooses how it computes with them.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path

from asking import LineServer, StreamAsker
from environment import INSTALL_SECONDS, Environment
from peer import Server, Setup, Started
from process import ServerProcess, run_logged

REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0")
WITHOUT = ("torchvision",)
"""Packages to uninstall. Text models do not need them, and builds for another version of torch make the export fail."""
SCRIPT = Path(__file__).resolve().parent / "serve_openvino.py"


class OpenVino:
    name = "openvino"
    has_lookup = True
    max_clients = 0

    def __init__(self) -> None:
        self._environment = Environment("openvino")

    def dtypes(self, cpu_flags: frozenset[str]) -> tuple[str, ...]:
        """Returns the dtype that OpenVINO would choose: bfloat16 if the processor computes in it, otherwise float32."""
        return ("bfloat16",) if "avx512_bf16" in cpu_flags else ("float32",)

    def install(self, model: Path) -> None:
        self._environment.install(REQUIREMENTS, without=WITHOUT)
        for weights in ("fp16", "int8"):
            self._export(model, weights)

    def _export(self, model: Path, weights: str) -> None:
        exported = self._exported(model, weights)
        if (exported / "openvino_tokenizer.xml").exists():  # an export writes this file last
            return
        shutil.rmtree(exported, ignore_errors=True)
        command = [str(self._environment.directory / "bin" / "optimum-cli"), "export", "openvino"]
        command += ["--model", str(model), "--task", "text-generation-with-past", "--weight-format", weights]
        run_logged([*command, str(exported)], log=self._environment.log, seconds=INSTALL_SECONDS, HF_HUB_OFFLINE="1")

    @contextmanager
    def start(self, setup: Setup) -> Started:
        weights, dtype = ("int8", "auto") if setup.dtype == "int8" else ("fp16", setup.dtype)
        command = [str(self._environment.python), str(SCRIPT), str(self._exported(setup.model, weights))]
        command += ["--dtype", dtype, "--threads", str(setup.num_threads), "--max-tokens", str(setup.max_tokens)]
        command += ["--lookup"] if setup.speculation else []
        with ServerProcess(command, environment={}, log=setup.log, speaks_lines=True) as process:
            server = LineServer(process, seconds=setup.answer_seconds)
            process.wait_until(lambda: server.is_ready, seconds=setup.start_seconds)
            yield Server(process, StreamAsker(server.stream, max_tokens=setup.max_tokens))

    def _exported(self, model: Path, weights: str) -> Path:
        name = model.name if weights == "fp16" else f"{model.name}-{weights}"
        return self._environment.directory / "models" / name
