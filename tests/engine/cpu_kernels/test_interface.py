"""Declarations that Python reads from the native kernels' headers."""

from __future__ import annotations

import ctypes
import re

import pytest

from outrider.engine.cpu_kernels import interface
from outrider.engine.cpu_kernels.compiler import SOURCE, find_compiler
from outrider.engine.cpu_kernels.interface import SIGNATURES, structures


def test_every_declaration_of_the_headers_is_read():
    text = "".join((SOURCE / name).read_text() for name in ("api.h", "sampler_api.h"))
    assert set(re.findall(r"(outrider_\w+)\(", text)) == set(SIGNATURES)
    assert set(re.findall(r"struct (\w+) {", text)) == set(vars(structures))


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_structures_lie_as_the_compiler_lays_them_out():
    lines = ["#include <cstddef>", '#include "sampler_api.h"']
    for name, structure in vars(structures).items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});")
        for field, _ in structure._fields_:
            place = getattr(structure, field)
            lines.append(f"static_assert(offsetof({name}, {field}) == {place.offset});")
            lines.append(f"static_assert(sizeof({name}::{field}) == {place.size});")
    find_compiler().compile("\n".join([*lines, ""]), ["-std=c++17", "-fsyntax-only"])
    assert dict(structures.OutriderFeatures._fields_)["projection"] is structures.OutriderMatrix
    assert dict(structures.OutriderSampling._fields_)["top_p"] is ctypes.c_double


@pytest.mark.parametrize(
    "field",
    ["int64_t sizes[4]", "int64_t one, two", "int32_t bit : 1", "void (*call)(int)", "/* a */ int32_t b"],
)
def test_a_field_that_is_not_understood_is_refused_and_not_left_out(field):
    with pytest.raises(ValueError, match="cannot parse"):
        list(interface._declarations(f"int64_t first;\n  {field};\n  float last;", ";"))


def test_signatures_are_those_of_the_headers():
    pointer = ctypes.c_void_p
    assert SIGNATURES["outrider_path"] == (ctypes.c_char_p, [])
    assert SIGNATURES["outrider_team_create"] == (pointer, [ctypes.c_int32])
    assert SIGNATURES["outrider_turns_give"] == (None, [pointer, ctypes.c_int32, ctypes.c_int64])
    result, arguments = SIGNATURES["outrider_unpack_row"]
    assert result is not ctypes.c_int32  # a status type that raises errors
    assert arguments == [ctypes.POINTER(structures.OutriderMatrix), ctypes.c_int64, pointer]


def test_a_call_whose_arguments_do_not_fit_is_refused(kernels):
    with pytest.raises(ctypes.ArgumentError):
        kernels.library.functions.outrider_unpack_row(structures.OutriderAttention(), 0, None)
