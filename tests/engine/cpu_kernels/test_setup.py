"""Packages as pip makes them, but for the isolated environment, which needs a registry."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.engine.cpu_kernels.compiler import SOURCE

ROOT = SOURCE.parents[3]
PACKAGE = Path("outrider", "engine", "cpu_kernels")


@pytest.fixture
def checkout(tmp_path):
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("outrider", "router", "prefill_node", "decode_node", "draft_node"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def made(checkout, hook, monkeypatch):
    """What pip calls, with a compiler that nobody may call."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("CXX", "/nonexistent")
    script = f"from setuptools.build_meta import build_wheel, build_editable, build_sdist\nprint({hook}('dist'))\n"
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=checkout, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (checkout / "dist").iterdir()
    return result


def test_a_wheel_is_pure_and_carries_the_kernels_sources(checkout, monkeypatch):
    wheel = made(checkout, "build_wheel", monkeypatch)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {(PACKAGE / "source" / file.name).as_posix() for file in SOURCE.iterdir()} <= names


def test_an_editable_install_compiles_nothing(checkout, monkeypatch):
    made(checkout, "build_editable", monkeypatch)


def test_a_source_distribution_carries_the_kernels_sources(checkout, monkeypatch):
    archive = made(checkout, "build_sdist", monkeypatch)
    shutil.unpack_archive(archive, checkout / "unpacked", filter="data")
    (project,) = (checkout / "unpacked").iterdir()
    assert {file.name for file in (project / PACKAGE / "source").iterdir()} == {file.name for file in SOURCE.iterdir()}
