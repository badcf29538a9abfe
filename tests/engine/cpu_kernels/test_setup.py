"""Packages as pip makes them, without the isolated environment, which needs a package index."""

import shutil
import tarfile
import zipfile
from pathlib import Path

from outrider.engine.cpu_kernels.compiler import SOURCE
from tests.support.processes import run_python

ROOT = SOURCE.parents[3]
PACKAGE = Path("outrider", "engine", "cpu_kernels")


def test_packages_are_pure_carry_the_kernels_sources_and_compile_nothing(tmp_path, monkeypatch):
    """Builds a wheel, an editable install and a source distribution like pip. No compiler may be called."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("outrider", "router", "prefill_node", "decode_node", "draft_node"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("CXX", "/nonexistent")
    script = "from setuptools import build_meta\n"
    script += "".join(f"build_meta.build_{kind}('{kind}')\n" for kind in ("sdist", "wheel", "editable"))
    done = run_python("-c", script, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,), (wheel,), (editable,) = ([*(checkout / kind).iterdir()] for kind in ("sdist", "wheel", "editable"))
    for built in (wheel, editable):
        assert built.name.endswith("-py3-none-any.whl")
    sources = {(PACKAGE / "source" / file.name).as_posix() for file in SOURCE.iterdir()}
    assert sources <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as files:
        assert sources <= {name.partition("/")[2] for name in files.getnames()}
