import ctypes
import platform
import re
from types import SimpleNamespace

import pytest

from outrider.engine.cpu_kernels import compiler, dot_product_speed, paths
from outrider.engine.cpu_kernels.compiler import CompileError, find_compiler
from outrider.engine.cpu_kernels.dot_product_speed import are_multiply_adds_faster
from outrider.engine.cpu_kernels.paths import REQUIRED_FLAGS, choose_kernels, processor_flags, processor_name
from outrider.errors import ConfigError

pytestmark = pytest.mark.skipif(platform.machine() not in compiler.X86_64, reason="paths of an x86-64 processor")

PORTABLE, AVX512, AVX512_BF16, AMX = (
    frozenset(REQUIRED_FLAGS[path]) for path in ("portable", "avx512", "avx512_bf16", "amx")
)


class Libraries:
    """Replaces compiling and loading. Records which paths were tried, and fails for those with a configured fault."""

    def __init__(self, folder):
        self.folder = folder
        self.tried = []
        self.does_not_compile = {}
        self.does_not_load = {}
        self.slow_dot_products = set()

    def compile(self, path, _progress):
        self.tried.append(path)
        if path in self.does_not_compile:
            raise self.does_not_compile[path]
        return self.folder / path

    def why_not_ready(self, library):
        return self.does_not_load.get(library.name, "")

    def are_multiply_adds_faster(self, library, _processor):
        return library.name in self.slow_dot_products


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    libraries = Libraries(tmp_path)
    monkeypatch.setattr(paths, "compile_library", libraries.compile)
    monkeypatch.setattr(paths, "_why_not_ready", libraries.why_not_ready)
    monkeypatch.setattr(paths, "are_multiply_adds_faster", libraries.are_multiply_adds_faster)
    return libraries


@pytest.mark.parametrize(
    ("wanted", "cpu_flags", "path"),
    [
        ("auto", AMX, "amx"),
        ("auto", AVX512_BF16, "avx512_bf16"),
        ("auto", AVX512, "avx512"),
        ("auto", PORTABLE, "portable"),
        ("portable", AMX, "portable"),
    ],
    ids=lambda value: None,
)
def test_the_wanted_path_or_the_best_of_the_processor_is_taken(libraries, wanted, cpu_flags, path):
    choice = choose_kernels(wanted, cpu_flags=cpu_flags)
    assert (choice.path, choice.library, choice.reason) == (path, libraries.folder / path, "")
    assert libraries.tried == [path]  # no other path was compiled
    assert str(choice) == f"native kernels: {path}"


def test_a_processor_below_the_portable_path_runs_torch_and_says_what_it_lacks(libraries):
    choice = choose_kernels(cpu_flags=PORTABLE - {"fma", "avx2"})
    assert choice.library is None
    assert str(choice) == "native kernels: none (the processor has no avx2, fma); torch kernels are used"
    assert libraries.tried == []


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_library_that_the_processor_needs_is_compiled_once(source, cache):
    told = []
    first = choose_kernels(cpu_flags=PORTABLE, progress=lambda *report: told.append(report))
    assert (first.path, first.reason) == ("portable", "")
    assert list(cache.glob("*/library.so")) == [first.library]
    assert told == [("kernels", 1, 1)]
    assert choose_kernels(cpu_flags=PORTABLE, progress=lambda *report: told.append(report)) == first
    assert told == [("kernels", 1, 1)]


NOT_CPP = CompileError("c++ one.cpp\none.cpp:1: error: no such thing")
NO_TILES = "the system does not allow it (EPERM)"
SLOW = {"slow_dot_products": {"avx512_bf16"}}


@pytest.mark.parametrize(
    ("faults", "cpu_flags", "path", "reason"),
    [
        ({"does_not_compile": {"avx512_bf16": NOT_CPP}}, AVX512_BF16, "avx512",
         "avx512_bf16: one.cpp:1: error: no such thing"),
        ({"does_not_load": {"amx": NO_TILES}}, AMX, "avx512_bf16", f"amx: {NO_TILES}"),
        (SLOW, AVX512_BF16, "avx512", "avx512_bf16: its instruction is slower here"),
        (SLOW | {"does_not_load": {"amx": NO_TILES}}, AMX, "avx512",
         f"amx: {NO_TILES}; avx512_bf16: its instruction is slower here"),
        (SLOW | {"does_not_compile": {"avx512": NOT_CPP}}, AVX512_BF16, "avx512_bf16", ""),
        (SLOW | {"does_not_load": {"avx512": NO_TILES}}, AVX512_BF16, "avx512_bf16", ""),
    ],
)  # fmt: skip
def test_the_next_best_path_is_taken_and_the_reason_told(libraries, faults, cpu_flags, path, reason):
    vars(libraries).update(faults)
    choice = choose_kernels(cpu_flags=cpu_flags)
    assert (choice.path, choice.library, choice.reason) == (path, libraries.folder / path, reason)
    assert choice.arithmetic == "avx512_bf16"
    assert str(choice) == f"native kernels: {path}" + f" ({reason})" * bool(reason)


def test_what_is_wanted_is_taken_slow_or_not(libraries):
    libraries.slow_dot_products = {"avx512_bf16"}
    assert choose_kernels("avx512_bf16", cpu_flags=AVX512_BF16).path == "avx512_bf16"


@pytest.fixture
def ratio(monkeypatch):
    """A namespace with the ratio that a measurement returns, and the number of measurements."""
    ratio = SimpleNamespace(value=1.0, num_asked=0, load=0.0)

    def measure(_library):
        ratio.num_asked += 1
        return ratio.value

    monkeypatch.setattr(dot_product_speed, "KernelLibrary", lambda file: file)
    monkeypatch.setattr(dot_product_speed, "_dot_product_ratio", measure)
    monkeypatch.setattr(dot_product_speed.os, "getloadavg", lambda: (ratio.load, 0.0, 0.0))
    return ratio


@pytest.mark.parametrize(("measured", "is_faster"), [(0.5, False), (1.05, False), (1.5, True)])
def test_dot_products_are_slow_where_they_take_longer_than_multiply_adds(ratio, tmp_path, measured, is_faster):
    ratio.value = measured
    assert are_multiply_adds_faster(tmp_path / "library.so", "one") == is_faster


def test_what_was_measured_is_kept_for_the_processor(ratio, tmp_path):
    library = tmp_path / "library.so"
    assert not are_multiply_adds_faster(library, "one")
    ratio.value = 2.0
    assert are_multiply_adds_faster(library, "other")
    assert not are_multiply_adds_faster(library, "one")
    assert are_multiply_adds_faster(library, "other")
    assert ratio.num_asked == 2


@pytest.mark.parametrize("why", ["the machine is loaded", "it was damaged", "there is no folder"])
def test_what_was_not_kept_is_measured_again(ratio, tmp_path, why):
    library = tmp_path / ("none" * (why == "there is no folder")) / "library.so"
    ratio.load = 1e6 * (why == "the machine is loaded")
    assert not are_multiply_adds_faster(library, "one")
    if why == "it was damaged":
        (kept,) = tmp_path.iterdir()
        kept.write_text("")
    ratio.value, ratio.load = 2.0, 0.0
    assert are_multiply_adds_faster(library, "one")


def test_compiled_kernels_that_cannot_be_kept_are_told(source, cache):
    cache.touch()  # a file where the folder should be
    assert "cannot store compiled kernels" in choose_kernels(cpu_flags=PORTABLE).reason


@pytest.mark.parametrize("wanted", ["amx", "avx512_bf16"])
def test_a_wanted_path_that_the_processor_has_not_is_an_error_with_the_reason(libraries, wanted):
    with pytest.raises(ConfigError, match=f"model.kernels {wanted} is not available: the processor has no avx512f"):
        choose_kernels(wanted, cpu_flags=PORTABLE)


def test_a_file_that_is_no_library_is_told(tmp_path, monkeypatch):
    (tmp_path / "library.so").touch()
    monkeypatch.setattr(paths, "compile_library", lambda *_: tmp_path / "library.so")
    choice = choose_kernels(cpu_flags=PORTABLE)
    assert choice.library is None
    assert "cannot be loaded" in choice.reason


def test_this_processor_says_what_it_has():
    assert "sse2" in processor_flags()
    assert re.fullmatch(r"\w+-\d+-\d+-\d+", processor_name())


@pytest.mark.parametrize("path", paths.PREFERENCE)
def test_a_library_calls_itself_by_its_path(path):
    try:
        choice = choose_kernels(path)
    except ConfigError as error:
        pytest.skip(str(error))
    functions = ctypes.CDLL(str(choice.library))
    functions.outrider_path.restype = ctypes.c_char_p
    assert functions.outrider_path().decode() == path
