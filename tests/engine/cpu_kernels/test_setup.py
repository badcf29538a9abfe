"""Wheels and editable installs as pip makes them, but for the isolated environment, which needs a registry."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.engine.cpu_kernels import build
from outrider.engine.cpu_kernels.build import MANIFEST_NAME, find_compiler, read_manifest

ROOT = Path(build.__file__).parents[3]
PACKAGE = Path("outrider", "engine", "cpu_kernels")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def checkout(tmp_path):
    """This project without its kernels but one, which compiles quickly, and without what was built here."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "libraries", "*.cpp")
    for name in ("outrider", "router", "prefill_node", "decode_node", "draft_node"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    (copy / PACKAGE / "source" / "one.cpp").write_text('extern "C" int outrider_one() { return 1; }\n')
    return copy


def run_setup(checkout, hook, monkeypatch, *, compiler=None):
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(checkout / "cache"))
    script = f"from setuptools.build_meta import build_wheel, build_editable, build_sdist\nprint({hook}('dist'))\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, cwd=checkout, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (checkout / "dist").iterdir()
    return result


def kernel_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix(f"{PACKAGE.as_posix()}/") for name in names if name.startswith(PACKAGE.as_posix())}


@needs_compiler
def test_a_wheel_carries_the_libraries_and_names_the_platform(checkout, monkeypatch):
    wheel = run_setup(checkout, "build_wheel", monkeypatch)
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    files = kernel_files(wheel)
    assert {f"libraries/{MANIFEST_NAME}", "libraries/portable.so", "source/api.h", "build.py"} <= files


def test_a_wheel_without_a_compiler_is_pure_and_carries_the_reason(checkout, monkeypatch):
    wheel = run_setup(checkout, "build_wheel", monkeypatch, compiler="/nonexistent")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {name for name in kernel_files(wheel) if name.startswith("libraries/")} == {f"libraries/{MANIFEST_NAME}"}
    manifest = zipfile.ZipFile(wheel).read((PACKAGE / "libraries" / MANIFEST_NAME).as_posix()).decode()
    assert build.NO_COMPILER in manifest


@needs_compiler
def test_sources_that_this_compiler_refuses_leave_a_working_package_with_the_reason(checkout, monkeypatch):
    (checkout / PACKAGE / "source" / "one.cpp").write_text("this is not C++\n")
    wheel = run_setup(checkout, "build_wheel", monkeypatch)
    manifest = zipfile.ZipFile(wheel).read((PACKAGE / "libraries" / MANIFEST_NAME).as_posix()).decode()
    assert "the sources did not compile" in manifest
    assert "one.cpp" in manifest


@needs_compiler
def test_an_editable_install_builds_beside_the_sources(checkout, monkeypatch):
    run_setup(checkout, "build_editable", monkeypatch)
    assert "portable" in read_manifest(checkout / PACKAGE / "libraries").built
    assert (checkout / PACKAGE / "libraries" / "portable.so").is_file()


def test_a_source_distribution_carries_the_sources_and_no_library(checkout, monkeypatch):
    archive = run_setup(checkout, "build_sdist", monkeypatch)
    unpacked = checkout / "unpacked"
    shutil.unpack_archive(archive, unpacked, filter="data")
    (project,) = unpacked.iterdir()
    assert sorted(path.name for path in (project / PACKAGE / "source").iterdir()) == sorted(
        path.name for path in (checkout / PACKAGE / "source").iterdir()
    )
    assert (project / "setup.py").is_file()
    assert not (project / PACKAGE / "libraries").exists()
