import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.cache_directory import CACHE_VARIABLE, user_cache_directory
from outrider.engine.cpu_kernels import build, compiler
from outrider.engine.cpu_kernels.build import ensure_built, read_manifest
from outrider.engine.cpu_kernels.compiler import CompileError, Compiler, find_compiler
from outrider.engine.cpu_kernels.library_cache import CACHED_LIBRARY

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """Two functions instead of all kernels: what is built does not matter here, only how."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "exports.map").write_bytes((compiler.SOURCE / "exports.map").read_bytes())
    (source / "one.cpp").write_text(
        '#define SHOWN extern "C" __attribute__((visibility("default")))\n'
        "SHOWN int outrider_one() { return 1; }\n"
        "SHOWN int something_else() { return 2; }\n"
    )
    monkeypatch.setattr(compiler, "SOURCE", source)
    monkeypatch.setattr(compiler, "PROBE", "")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return source


@pytest.fixture
def one_path(monkeypatch):
    monkeypatch.setattr(compiler, "X86_PATHS", compiler.OTHER_PATHS)


ONE = '#include "one.cpp"\n'


@pytest.fixture
def compiled(monkeypatch):
    """The texts that were compiled, in order."""
    original, units = Compiler.compile, []

    def compile_unit(self, unit, arguments):
        units.append(unit)
        return original(self, unit, arguments)

    monkeypatch.setattr(Compiler, "compile", compile_unit)
    return units


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
    assert set(manifest.built) | set(manifest.left_out) == set(compiler.path_flags())
    assert read_manifest(folder) == manifest
    library = ctypes.CDLL(str(folder / "portable.so"))
    assert library.outrider_one() == 1
    with pytest.raises(AttributeError):
        library.something_else  # noqa: B018
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [build.MANIFEST_NAME, *(f"{path}.so" for path in manifest.built)]
    )


@needs_compiler
def test_a_library_is_compiled_once_for_all_folders_until_something_changes(
    small_sources, one_path, tmp_path, compiled, monkeypatch
):
    for folder in ("a", "a", "b"):
        manifest = ensure_built(tmp_path / folder)
        assert ctypes.CDLL(str(tmp_path / folder / "portable.so")).outrider_one() == 1
        assert (manifest.built, compiled) == ({"portable": list(compiler.COMPILE_FLAGS)}, [ONE])
    (tmp_path / "a" / "portable.so").unlink()
    ensure_built(tmp_path / "a")
    assert (tmp_path / "a" / "portable.so").is_file()
    assert len(compiled) == 1
    (small_sources / "one.cpp").open("a").write("// changed\n")
    ensure_built(tmp_path / "a")
    assert len(compiled) == 2
    monkeypatch.setenv("CXX", f"env {find_compiler().command[0]}")
    (tmp_path / "a" / build.MANIFEST_NAME).unlink()
    ensure_built(tmp_path / "a")
    assert len(compiled) == 3
    header = tmp_path / "header.h"
    for text in ("", "", "// changed"):
        header.write_text(text)
        build.build(tmp_path / "c", find_compiler(), paths={"made": ("-include", str(header))}, inputs=[header])
    assert len(compiled) == 5


@needs_compiler
def test_two_builders_at_once_compile_once(small_sources, one_path, tmp_path, compiled):
    with ThreadPoolExecutor(2) as pool:  # a lock on a file is held against another opening of it, also in one process
        manifests = list(pool.map(ensure_built, [tmp_path / "a", tmp_path / "b"]))
    assert manifests[0] == manifests[1]
    assert compiled == [ONE]


@needs_compiler
def test_a_damaged_library_in_the_cache_is_compiled_again(small_sources, one_path, tmp_path, compiled):
    ensure_built(tmp_path / "a")
    (cached,) = (tmp_path / "cache" / "kernels").glob(f"*/{CACHED_LIBRARY}")
    cached.write_bytes(cached.read_bytes()[:-1])
    ensure_built(tmp_path / "b")
    assert len(compiled) == 2
    assert ctypes.CDLL(str(tmp_path / "b" / "portable.so")).outrider_one() == 1


@needs_compiler
def test_what_nobody_asked_for_in_a_while_leaves_the_cache(small_sources, one_path, tmp_path, compiled):
    kept = tmp_path / "cache" / "kernels"
    ensure_built(tmp_path / "a")
    (first,) = (path for path in kept.iterdir() if path.is_dir())
    (kept / "objects-of-a-killed-process").mkdir()
    os.utime(first, (0, 0))
    ensure_built(tmp_path / "b")  # which is asking for it
    (small_sources / "one.cpp").open("a").write("// changed\n")
    ensure_built(tmp_path / "b")
    assert first.is_dir()
    assert not list(kept.glob("objects-*"))
    os.utime(first, (0, 0))
    (small_sources / "one.cpp").open("a").write("// changed again\n")
    ensure_built(tmp_path / "b")
    assert not first.exists()
    assert len(compiled) == 3


@needs_compiler
def test_a_cache_that_cannot_be_used_costs_the_time_to_compile(
    small_sources, one_path, tmp_path, compiled, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    for folder in ("a", "b"):
        ensure_built(tmp_path / folder)
        assert ctypes.CDLL(str(tmp_path / folder / "portable.so")).outrider_one() == 1
    assert len(compiled) == 2
    said = capsys.readouterr().err
    assert "compiled kernels are not kept: " in said
    assert str(tmp_path / "file" / "kernels") in said


def test_the_cache_is_the_users_unless_a_variable_names_another(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_directory() == Path.home() / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_directory() == Path("/somewhere/outrider")
    monkeypatch.setenv(CACHE_VARIABLE, "~/models")
    assert user_cache_directory() == Path.home() / "models"


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
def test_warnings_are_kept_with_the_library_and_errors_only_when_asked_for(
    small_sources, one_path, tmp_path, compiled, capsys
):
    (small_sources / "one.cpp").open("a").write("static int unused() { return 0; }\n")
    assert build.main(["--into", str(tmp_path / "a")]) == 0
    assert "unused" not in capsys.readouterr().err
    for folder in ("a", "b"):
        assert build.main(["--into", str(tmp_path / folder), "--warnings"]) == 1
        assert "unused" in capsys.readouterr().err
    assert len(compiled) == 1


def test_without_a_compiler_nothing_is_built_and_the_reason_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.main(["--into", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "native kernels: none; there is no C++ compiler (CXX=/nonexistent)\n"
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_compiler_that_went_away_takes_nothing_with_it(small_sources, one_path, tmp_path, monkeypatch):
    before = ensure_built(tmp_path / "libraries")
    monkeypatch.setenv("CXX", "/nonexistent")
    assert ensure_built(tmp_path / "libraries") == before
    (small_sources / "one.cpp").open("a").write("// changed\n")
    assert ensure_built(tmp_path / "libraries") is None
    assert list((tmp_path / "libraries").iterdir()) == []


def test_flags_that_the_compiler_does_not_know_are_a_reason(small_sources, tmp_path, fake_compiler, monkeypatch):
    monkeypatch.setattr(compiler, "OTHER_PATHS", compiler.X86_PATHS)
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
    before = compiler.source_hash()
    (small_sources / ".one.cpp.swp").write_bytes(b"an editor's")
    assert compiler.source_hash() == before
    (small_sources / "two.h").write_text("")
    assert compiler.source_hash() != before


def test_building_needs_the_standard_library_only(tmp_path):
    environment = {"PATH": os.environ["PATH"], "CXX": "/nonexistent"}
    command = [sys.executable, "-S", "-m", build.__name__, "--into", str(tmp_path)]
    root = Path(build.__file__).parents[3]
    done = subprocess.run(command, check=False, cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("native kernels: none")
