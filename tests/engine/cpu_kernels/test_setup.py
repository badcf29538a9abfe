"""Wheels and editable installs as pip makes them, but for the isolated environment, which needs a registry."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.cache_directory import CACHE_VARIABLE
from outrider.engine.cpu_kernels import build
from outrider.engine.cpu_kernels.build import MANIFEST_NAME, Manifest, read_manifest
from outrider.engine.cpu_kernels.compiler import find_compiler

ROOT = Path(build.__file__).parents[3]
PACKAGE = Path("outrider", "engine", "cpu_kernels")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def checkout(tmp_path):
    """This project without its kernels but one, which compiles quickly, and without what was built here."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "libraries", "*.cpp")
    for name in ("outrider", "router", "prefill_node", "decode_node", "draft_node"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    (copy / PACKAGE / "source" / "one.cpp").write_text('extern "C" int outrider_one() { return 1; }\n')
    return copy


def run_setup(checkout, hook, monkeypatch):
    """What pip calls, with a compiler that nobody may call."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("CXX", "/nonexistent")
    script = f"from setuptools.build_meta import build_wheel, build_editable, build_sdist\nprint({hook}('dist'))\n"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, check=False, cwd=checkout, capture_output=True, text=True, timeout=240)


def made(checkout, hook, monkeypatch):
    done = run_setup(checkout, hook, monkeypatch)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (checkout / "dist").iterdir()
    return result


def build_kernels(checkout, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(checkout / "cache"))
    command = [sys.executable, "-m", build.__name__]
    subprocess.run(command, check=True, cwd=checkout, timeout=240)


def kernel_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix(f"{PACKAGE.as_posix()}/") for name in names if name.startswith(PACKAGE.as_posix())}


def test_a_wheel_is_pure_and_compiles_nothing(checkout, monkeypatch):
    wheel = made(checkout, "build_wheel", monkeypatch)
    assert wheel.name.endswith("-py3-none-any.whl")
    files = kernel_files(wheel)
    assert {"source/api.h", "source/one.cpp", "build.py"} <= files
    assert not {name for name in files if name.startswith("libraries/")}


@needs_compiler
def test_a_wheel_carries_the_libraries_that_were_built_and_names_the_platform(checkout, monkeypatch):
    build_kernels(checkout, monkeypatch)
    assert "portable" in read_manifest(checkout / PACKAGE / "libraries").built
    wheel = made(checkout, "build_wheel", monkeypatch)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert {f"libraries/{MANIFEST_NAME}", "libraries/portable.so", "source/api.h"} <= kernel_files(wheel)


def test_a_wheel_with_libraries_of_other_sources_is_refused(checkout, monkeypatch):
    Manifest(source_hash="0" * 64, built={"portable": []}).write(checkout / PACKAGE / "libraries")
    done = run_setup(checkout, "build_wheel", monkeypatch)
    assert done.returncode != 0
    assert "are not made of the sources beside them" in done.stderr
    made(checkout, "build_editable", monkeypatch)  # does not carry them: make builds them again


def test_an_editable_install_compiles_nothing(checkout, monkeypatch):
    made(checkout, "build_editable", monkeypatch)
    assert not (checkout / PACKAGE / "libraries").exists()


def test_a_source_distribution_carries_the_sources_and_no_library(checkout, monkeypatch):
    library = checkout / PACKAGE / "libraries" / "portable.so"
    library.parent.mkdir()
    library.touch()
    archive = made(checkout, "build_sdist", monkeypatch)
    unpacked = checkout / "unpacked"
    shutil.unpack_archive(archive, unpacked, filter="data")
    (project,) = unpacked.iterdir()
    assert sorted(path.name for path in (project / PACKAGE / "source").iterdir()) == sorted(
        path.name for path in (checkout / PACKAGE / "source").iterdir()
    )
    assert (project / "setup.py").is_file()
    assert not (project / PACKAGE / "libraries").exists()
