"""`make` compiles all that services import to bytecode, since PYTHONDONTWRITEBYTECODE may be set when they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0


@pytest.mark.full
@pytest.mark.slow
def test_services_import_nothing_that_the_install_did_not_compile(start_cluster, tmp_path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (services,) = re.findall(r"^SERVICES := (.*\\\n.*)$", makefile, re.MULTILINE)
    services = services.replace("\\\n", "")
    assert "\t$(BIN)/python -c 'import $(SERVICES)'\n" in makefile
    environ = {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-c", f"import {services}"]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, cwd=ROOT, env=inherited | environ, timeout=300)
    compiled = set(tmp_path.rglob("*.pyc"))
    with start_cluster(environ={**environ, "PYTHONDONTWRITEBYTECODE": ""}) as cluster:
        cluster.wait_serving(START_SECONDS)
    libraries = [str(file) for file in set(tmp_path.rglob("*.pyc")) - compiled if "site-packages" in file.parts]
    assert "\n".join(file for file in libraries if "/transformers/models/" not in file) == ""  # a checkpoint's, once
