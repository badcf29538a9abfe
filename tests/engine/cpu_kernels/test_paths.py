import ctypes
import platform

import pytest

from outrider.cache_directory import CACHE_VARIABLE
from outrider.engine.cpu_kernels import compiler, paths
from outrider.engine.cpu_kernels.build import Manifest, library_path
from outrider.engine.cpu_kernels.compiler import find_compiler, source_hash
from outrider.engine.cpu_kernels.paths import REQUIRED_FLAGS, choose_kernels, processor_flags
from outrider.errors import ConfigError

pytestmark = pytest.mark.skipif(platform.machine() not in compiler.X86_64, reason="paths of an x86-64 processor")

PORTABLE, AVX512_BF16, AMX = (frozenset(REQUIRED_FLAGS[path]) for path in ("portable", "avx512_bf16", "amx"))


@pytest.fixture
def loads(monkeypatch):
    """Stands in for loading: which libraries were tried, and what they answered."""
    tried, answers = [], {}

    def prepare(library):
        tried.append(library.stem)
        return answers.get(library.stem, "")

    monkeypatch.setattr(paths, "_why_not_ready", prepare)
    return tried, answers


@pytest.fixture
def folder(tmp_path):
    for path in compiler.X86_PATHS:
        library_path(tmp_path, path).write_bytes(b"")
    Manifest(source_hash=source_hash(), built={path: [] for path in compiler.X86_PATHS}).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("cpu_flags", "path"), [(AMX, "amx"), (AVX512_BF16, "avx512_bf16"), (PORTABLE, "portable")], ids=lambda value: None
)
def test_the_best_path_of_the_processor_is_taken(folder, loads, cpu_flags, path):
    choice = choose_kernels(folder=folder, cpu_flags=cpu_flags)
    assert (choice.path, choice.library, choice.reason) == (path, folder / f"{path}.so", "")
    assert loads[0] == [path]  # no other is even opened
    assert str(choice) == f"native kernels: {path}"


def test_a_processor_below_the_portable_path_runs_torch_and_says_what_it_lacks(folder, loads):
    choice = choose_kernels(folder=folder, cpu_flags=PORTABLE - {"fma", "avx2"})
    assert choice.library is None
    assert str(choice) == "native kernels: none (the processor has no avx2, fma); torch kernels are used"
    assert loads[0] == []


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    """An installed package without libraries, sources that compile quickly, and an empty cache, which is returned."""
    monkeypatch.delenv(paths.LIBRARIES_VARIABLE, raising=False)
    monkeypatch.setattr(paths, "LIBRARIES", tmp_path / "libraries")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    (source / "exports.map").write_bytes((compiler.SOURCE / "exports.map").read_bytes())
    (source / "one.cpp").write_text(
        '#define SHOWN extern "C" __attribute__((visibility("default")))\n'
        "SHOWN int outrider_prepare_process() { return 0; }\n"
    )
    monkeypatch.setattr(compiler, "SOURCE", source)
    return tmp_path / "cache"


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_package_without_libraries_compiles_the_one_that_the_processor_needs_once(nothing_built):
    told = []
    first = choose_kernels(cpu_flags=PORTABLE, progress=lambda *report: told.append(report))
    assert (first.path, first.reason) == ("portable", "")
    assert first.library.is_relative_to(nothing_built / "kernels")
    assert len(list((nothing_built / "kernels").glob("*/library.so"))) == 1
    assert told == [(1, 1)]
    assert choose_kernels(cpu_flags=PORTABLE, progress=lambda *report: told.append(report)) == first
    assert told == [(1, 1)]


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_path_that_does_not_compile_leaves_the_next_one_and_the_reason(nothing_built):
    (compiler.SOURCE / "one.cpp").open("a").write('#ifdef __AVX512F__\n#error "no such thing"\n#endif\n')
    choice = choose_kernels(cpu_flags=AVX512_BF16)
    assert choice.path == "portable"
    assert choice.reason.startswith("avx512_bf16: ")
    assert "no such thing" in choice.reason


def test_without_libraries_and_without_a_compiler_torch_runs_and_the_reason_is_told(nothing_built, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert str(choose_kernels(cpu_flags=AMX)) == (
        "native kernels: none (there is no C++ compiler (CXX=/nonexistent)); torch kernels are used"
    )


def test_compiled_kernels_that_cannot_be_kept_are_told(nothing_built, monkeypatch):
    nothing_built.touch()  # a file where the folder should be
    assert "compiled ones cannot be kept" in choose_kernels(cpu_flags=PORTABLE).reason


def test_a_folder_without_libraries_runs_torch_and_names_the_fix(tmp_path):
    choice = choose_kernels(folder=tmp_path, cpu_flags=AMX)
    assert choice.library is None
    assert "make setup" in choice.reason


def test_a_path_that_the_compiler_did_not_know_leaves_the_next_one_and_the_reason(folder, loads):
    built = {path: [] for path in ("portable", "avx512_bf16")}
    Manifest(source_hash=source_hash(), built=built, left_out={"amx": "g++ 9: no -mamx-tile"}).write(folder)
    choice = choose_kernels(folder=folder, cpu_flags=AMX)
    assert (choice.path, choice.reason) == ("avx512_bf16", "amx: g++ 9: no -mamx-tile")


def test_a_system_that_refuses_tiles_leaves_the_next_path(folder, loads):
    loads[1]["amx"] = "the system refuses it to this process (EPERM)"
    choice = choose_kernels(folder=folder, cpu_flags=AMX)
    assert (choice.path, choice.reason) == ("avx512_bf16", "amx: the system refuses it to this process (EPERM)")


def test_libraries_of_other_sources_are_refused(folder, loads):
    Manifest(source_hash="0" * 64, built={"portable": []}).write(folder)
    for wanted in ("auto", "portable"):
        with pytest.raises(ConfigError, match="make setup"):
            choose_kernels(wanted, folder=folder, cpu_flags=PORTABLE)
    assert choose_kernels("torch", folder=folder).library is None


def test_a_missing_library_is_told(folder, loads):
    library_path(folder, "portable").unlink()
    assert "portable.so is missing" in choose_kernels(folder=folder, cpu_flags=PORTABLE).reason


@pytest.mark.parametrize("wanted", ["amx", "avx512_bf16"])
def test_a_wanted_path_that_the_processor_has_not_is_an_error_with_the_reason(folder, loads, wanted):
    with pytest.raises(ConfigError, match=f"model.kernels {wanted} cannot be had: the processor has no avx512f"):
        choose_kernels(wanted, folder=folder, cpu_flags=PORTABLE)


def test_a_wanted_path_below_the_best_is_taken(folder, loads):
    assert choose_kernels("portable", folder=folder, cpu_flags=AMX).path == "portable"
    assert loads[0] == ["portable"]


def test_a_file_that_is_no_library_is_told(folder):
    choice = choose_kernels(folder=folder, cpu_flags=PORTABLE)
    assert choice.library is None
    assert "cannot be loaded" in choice.reason


def test_the_variable_names_the_folder(folder, loads, monkeypatch):
    monkeypatch.setenv(paths.LIBRARIES_VARIABLE, str(folder))
    assert choose_kernels(cpu_flags=PORTABLE).library == folder / "portable.so"


def test_this_processor_says_what_it_has():
    assert "sse2" in processor_flags()


@pytest.mark.parametrize("path", paths.PREFERENCE)
def test_a_library_calls_itself_by_its_path(path):
    try:
        choice = choose_kernels(path)
    except ConfigError as error:
        pytest.skip(str(error))
    functions = ctypes.CDLL(str(choice.library))
    functions.outrider_path.restype = ctypes.c_char_p
    assert functions.outrider_path().decode() == path
