import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.cache_directory import CACHE_VARIABLE, user_cache_directory
from outrider.engine.cpu_kernels import build, compiler
from outrider.engine.cpu_kernels.compiler import CompileError, Compiler, find_compiler
from outrider.engine.cpu_kernels.library_cache import (
    CACHED_ENTRY,
    LIBRARIES_VARIABLE,
    compile_libraries,
    compile_library,
    libraries_directory,
)
from tests.support.processes import run_python

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def compiled(monkeypatch):
    """A list of the compiled source texts, in order."""
    original, units = Compiler.compile, []

    def compile_unit(self, unit, arguments):
        units.append(unit)
        return original(self, unit, arguments)

    monkeypatch.setattr(Compiler, "compile", compile_unit)
    return units


@pytest.fixture
def fake_compiler(tmp_path):
    """fake_compiler(script) makes an executable that answers --version, and otherwise runs the script."""

    def make(script):
        file = tmp_path / "fake-c++"
        file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{script}\n')
        file.chmod(0o755)
        return file

    return make


def portable():
    return ctypes.CDLL(str(compile_library("portable")))


def change(source, text="// changed\n"):
    with source.open("a") as file:
        file.write(text)


@needs_compiler
def test_a_library_shows_our_functions_only(source):
    assert portable().outrider_one() == 1
    with pytest.raises(AttributeError):
        portable().something_else  # noqa: B018


@needs_compiler
def test_a_library_is_compiled_once_until_something_changes(source, compiled):
    for _ in range(2):
        compile_library("portable")
        assert compiled == ['#include "one.cpp"\n']
    change(source)
    compile_library("portable")
    assert len(compiled) == 2
    for flag in ("-DONE", "-DONE", "-DOTHER"):
        compile_libraries({"made": (flag,)})
    assert len(compiled) == 4


@needs_compiler
def test_two_processes_at_once_compile_once(source, compiled):
    with ThreadPoolExecutor(2) as pool:  # two threads suffice: a second open of the lock file waits, too
        libraries = list(pool.map(compile_library, ["portable", "portable"]))
    assert libraries[0] == libraries[1]
    assert len(compiled) == 1


@needs_compiler
def test_a_damaged_library_is_compiled_again(source, compiled):
    library = compile_library("portable")
    library.write_bytes(library.read_bytes()[:-1])
    assert portable().outrider_one() == 1
    assert len(compiled) == 2


@needs_compiler
def test_libraries_unused_for_long_leave_the_cache(source, cache, compiled):
    first = compile_library("portable").parent
    (cache / "objects-of-a-killed-process").mkdir()
    os.utime(first, (0, 0))
    compile_library("portable")  # used
    change(source)
    compile_library("portable")
    assert first.is_dir()
    assert not list(cache.glob("objects-*"))
    os.utime(first, (0, 0))
    change(source)
    compile_library("portable")
    assert not first.exists()
    assert len(compiled) == 3


@needs_compiler
def test_a_compiled_library_needs_no_compiler(source, monkeypatch):
    library = compile_library("portable")
    monkeypatch.setenv("CXX", "/nonexistent")
    assert compile_library("portable") == library
    change(source)
    with pytest.raises(CompileError, match="there is no C"):
        compile_library("portable")


def test_the_cache_is_the_users_unless_a_variable_names_another(monkeypatch):
    for variable in (LIBRARIES_VARIABLE, CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert user_cache_directory() == Path.home() / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache_directory() == Path("/somewhere/outrider")
    monkeypatch.setenv(CACHE_VARIABLE, "~/models")
    assert user_cache_directory() == Path.home() / "models"
    assert libraries_directory() == (Path.home() / "models" / "kernels").resolve()


@needs_compiler
def test_a_source_that_does_not_compile_is_an_error(source, capsys):
    change(source, "this is not C++\n")
    with pytest.raises(CompileError, match=r"one\.cpp"):
        compile_library("portable")
    assert build.main(["--all"]) == 1
    assert "one.cpp" in capsys.readouterr().err


@needs_compiler
def test_warnings_are_kept_with_the_library(source, compiled):
    change(source, "static int unused() { return 0; }\n")
    for _ in range(2):
        library = compile_library("portable")
        assert "unused" in library.with_name(CACHED_ENTRY).read_text()
    assert len(compiled) == 1


def test_without_a_compiler_the_reason_is_told(cache, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.main([]) == 0
    assert "there is no C++ compiler (CXX=/nonexistent)" in capsys.readouterr().out


def test_flags_that_the_compiler_does_not_know_are_a_reason(source, fake_compiler, monkeypatch, capsys):
    script = 'case "$*" in *-mamx-tile*) echo "x.cpp: error: no option -mamx-tile" >&2; exit 1;; *" -o "*) ;; esac\n'
    script += 'for last; do :; done; case "$*" in *" -o "*) : > "$last";; esac'
    monkeypatch.setenv("CXX", str(fake_compiler(script)))
    libraries, left_out = compile_libraries({"portable": (), "amx": ("-mamx-tile",)})
    assert list(libraries) == ["portable"]
    assert left_out == {"amx": "fake 1.0: x.cpp: error: no option -mamx-tile"}


def test_a_chosen_compiler_is_the_only_one_and_may_have_arguments(fake_compiler, monkeypatch):
    file = fake_compiler("exit 0")
    monkeypatch.setenv("CXX", f"env {file}")
    assert find_compiler() == Compiler(("env", str(file)), find_compiler().version)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert find_compiler() is None


def test_the_hash_is_of_sources_and_not_of_what_else_lies_there(source):
    before = compiler.source_hash()
    source.with_name(".one.cpp.swp").write_bytes(b"an editor's")
    assert compiler.source_hash() == before
    source.with_name("two.h").write_text("")
    assert compiler.source_hash() != before


def test_building_needs_the_standard_library_only(tmp_path):
    environment = {"PATH": os.environ["PATH"], "CXX": "/nonexistent", LIBRARIES_VARIABLE: str(tmp_path)}
    done = run_python("-S", "-m", build.__name__, "--all", cwd=Path(build.__file__).parents[3], env=environment)
    assert done.stderr == "there is no C++ compiler (CXX=/nonexistent)\n"
