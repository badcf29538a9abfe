import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.cpu_kernels import build
from outrider.engine.cpu_kernels.build import (
    CompileError,
    Compiler,
    Manifest,
    ensure_built,
    find_compiler,
    read_manifest,
    record_absence,
)

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """Two functions instead of all kernels: what is built does not matter here, only how."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "exports.map").write_bytes((build.SOURCE / "exports.map").read_bytes())
    (source / "one.cpp").write_text(
        '#define SHOWN extern "C" __attribute__((visibility("default")))\n'
        "SHOWN int outrider_one() { return 1; }\n"
        "SHOWN int something_else() { return 2; }\n"
    )
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "PROBE", "")
    return source


@pytest.fixture
def one_path(monkeypatch):
    monkeypatch.setattr(build, "path_flags", lambda: build.OTHER_PATHS)


@pytest.fixture
def counted_builds(monkeypatch):
    original, calls = build.build, []

    def count(folder, compiler, **options):
        calls.append(folder)
        return original(folder, compiler, **options)

    monkeypatch.setattr(build, "build", count)
    return calls


@pytest.fixture
def fake_compiler(tmp_path):
    """Makes an executable that answers --version and fails where the script says so."""

    def make(script):
        file = tmp_path / "fake-c++"
        file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{script}\n')
        file.chmod(0o755)
        return file

    return make


@needs_compiler
def test_every_path_is_built_and_shows_our_functions_only(small_sources, tmp_path):
    folder = tmp_path / "libraries"
    manifest = ensure_built(folder)
    assert set(manifest.built) | set(manifest.left_out) == set(build.path_flags())
    assert read_manifest(folder) == manifest
    library = ctypes.CDLL(str(folder / "portable.so"))
    assert library.outrider_one() == 1
    with pytest.raises(AttributeError):
        library.something_else  # noqa: B018
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [build.MANIFEST_NAME, *(f"{path}.so" for path in manifest.built)]
    )


@needs_compiler
def test_nothing_is_built_twice_until_something_changes(small_sources, one_path, tmp_path, counted_builds):
    folder = tmp_path / "libraries"
    ensure_built(folder)
    ensure_built(folder)
    assert len(counted_builds) == 1
    (small_sources / "one.cpp").open("a").write("// changed\n")
    ensure_built(folder)
    assert len(counted_builds) == 2
    (folder / "portable.so").unlink()
    ensure_built(folder)
    assert len(counted_builds) == 3
    ensure_built(folder, warnings=True)
    assert len(counted_builds) == 4


@needs_compiler
def test_a_source_that_does_not_compile_is_an_error_and_leaves_what_was_there(
    small_sources, one_path, tmp_path, capsys
):
    folder = tmp_path / "libraries"
    before = ensure_built(folder)
    (small_sources / "one.cpp").open("a").write("this is not C++\n")
    with pytest.raises(CompileError, match=r"one\.cpp"):
        ensure_built(folder)
    assert build.main(["--into", str(folder)]) == 1
    assert "one.cpp" in capsys.readouterr().err
    assert read_manifest(folder) == before


@needs_compiler
def test_warnings_are_errors_only_when_asked_for(small_sources, one_path, tmp_path):
    (small_sources / "one.cpp").open("a").write("static int unused() { return 0; }\n")
    assert build.main(["--into", str(tmp_path / "a")]) == 0
    assert build.main(["--into", str(tmp_path / "b"), "--warnings"]) == 1


def test_without_a_compiler_the_reason_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.main(["--into", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("native kernels: none")
    assert "no C++ compiler was found at install time (CXX=/nonexistent)" in said
    assert set(json.loads((tmp_path / build.MANIFEST_NAME).read_text())["left_out"]) == set(build.path_flags())


@needs_compiler
def test_a_compiler_that_went_away_takes_nothing_with_it(small_sources, one_path, tmp_path, monkeypatch):
    before = ensure_built(tmp_path / "libraries")
    monkeypatch.setenv("CXX", "/nonexistent")
    assert ensure_built(tmp_path / "libraries") == before
    (small_sources / "one.cpp").open("a").write("// changed\n")
    assert ensure_built(tmp_path / "libraries").built == {}
    assert not (tmp_path / "libraries" / "portable.so").exists()


def test_flags_that_the_compiler_does_not_know_are_a_reason(small_sources, tmp_path, fake_compiler, monkeypatch):
    monkeypatch.setattr(build, "path_flags", lambda: build.X86_PATHS)
    script = 'case "$*" in *-mamx-tile*) echo "x.cpp: error: no option -mamx-tile" >&2; exit 1;; *" -o "*) ;; esac\n'
    script += 'for last; do :; done; case "$*" in *" -o "*) : > "$last";; esac'
    monkeypatch.setenv("CXX", str(fake_compiler(script)))
    manifest = ensure_built(tmp_path / "libraries")
    assert list(manifest.built) == ["portable", "avx512_bf16"]
    assert manifest.left_out == {"amx": "fake 1.0: x.cpp: error: no option -mamx-tile"}


def test_a_chosen_compiler_is_the_only_one_and_may_have_arguments(fake_compiler, monkeypatch):
    file = fake_compiler("exit 0")
    monkeypatch.setenv("CXX", f"env {file}")
    assert find_compiler() == Compiler(("env", str(file)), find_compiler().version)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert find_compiler() is None


def test_a_manifest_of_another_version_counts_as_none(tmp_path):
    (tmp_path / build.MANIFEST_NAME).write_text('{"something": 1}')
    assert read_manifest(tmp_path) is None
    (tmp_path / build.MANIFEST_NAME).write_text("{")
    assert read_manifest(tmp_path) is None


def test_the_hash_is_of_sources_and_not_of_what_else_lies_there(small_sources):
    before = build.source_hash()
    (small_sources / ".one.cpp.swp").write_bytes(b"an editor's")
    assert build.source_hash() == before
    (small_sources / "two.h").write_text("")
    assert build.source_hash() != before


def test_absence_removes_stale_libraries(tmp_path):
    (tmp_path / "portable.so").write_bytes(b"")
    Manifest(source_hash="0" * 64, built={"portable": []}).write(tmp_path)
    record_absence(tmp_path, "because")
    assert [path.name for path in tmp_path.iterdir()] == [build.MANIFEST_NAME]


def test_the_script_needs_neither_the_package_nor_torch(tmp_path):
    environment = {"PATH": os.environ["PATH"], "CXX": "/nonexistent"}
    script = Path(build.__file__)
    shutil.copytree(script.parent / "source", tmp_path / "source")
    copy = shutil.copy(script, tmp_path)
    command = [sys.executable, "-I", "-S", str(copy)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "libraries").source_hash == build.source_hash()
