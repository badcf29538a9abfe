"""What Python takes from the headers of the native kernels."""

from __future__ import annotations

import ctypes
import re

import pytest

from outrider.engine.cpu_kernels.compiler import SOURCE
from outrider.engine.cpu_kernels.interface import SIGNATURES, structures


def test_every_declaration_of_the_headers_is_read():
    text = "".join((SOURCE / name).read_text() for name in ("api.h", "sampler_api.h"))
    assert set(re.findall(r"(outrider_\w+)\(", text)) == set(SIGNATURES)
    assert set(re.findall(r"struct (\w+) {", text)) == set(vars(structures))


def test_structures_have_the_fields_of_the_headers():
    assert structures.OutriderMatrix._fields_ == [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("type", ctypes.c_int32),
    ]
    assert dict(structures.OutriderFeatures._fields_)["projection"] is structures.OutriderMatrix
    assert dict(structures.OutriderSampling._fields_)["top_p"] is ctypes.c_double
    assert ctypes.sizeof(structures.OutriderLayer) == 4 * 8 + 4 * 48 + 8


def test_signatures_are_those_of_the_headers():
    pointer = ctypes.c_void_p
    assert SIGNATURES["outrider_path"] == (ctypes.c_char_p, [])
    assert SIGNATURES["outrider_team_create"] == (pointer, [ctypes.c_int32])
    assert SIGNATURES["outrider_turns_give"] == (None, [pointer, ctypes.c_int32, ctypes.c_int64])
    result, arguments = SIGNATURES["outrider_unpack_row"]
    assert result is not ctypes.c_int32  # a status, which is raised
    assert arguments == [ctypes.POINTER(structures.OutriderMatrix), ctypes.c_int64, pointer]


def test_a_call_whose_arguments_do_not_fit_is_refused(kernels):
    with pytest.raises(ctypes.ArgumentError):
        kernels.library.functions.outrider_unpack_row(structures.OutriderAttention(), 0, None)
