"""The kernels' C interface for ctypes, parsed from its headers: structures and signatures. Torch-free.

The parser understands what `source/api.h` and `source/sampler_api.h` consist of: numbers of known size, pointers,
structures that begin a line and are declared before others contain them, and functions.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from outrider.engine.cpu_kernels.compiler import SOURCE

_HEADERS = "".join((SOURCE / name).read_text(encoding="utf-8") for name in ("api.h", "sampler_api.h"))
_CODE = re.sub(r"//.*|\bconst\b", "", _HEADERS)


class _Status(ctypes.c_int32):
    """A status: 0, or an errno."""


_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
    "char*": ctypes.c_char_p,
    "OutriderStatus": _Status,
}


def _type_of(kind: str) -> Any:
    """Returns the ctypes type of a C type. Pointers become addresses, except arguments that point to our structures
    (see `_signatures`).
    """
    return _TYPES.get(kind, ctypes.c_void_p) if kind.endswith("*") else _TYPES[kind]


def _declarations(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """Yields (name, kind) of each field or argument; kinds have no spaces: "OutriderBatch*".

    Raises: ValueError if a declaration cannot be parsed.
    """
    for declaration in map(str.strip, text.split(separator)):
        if declaration not in ("", "void"):  # the text after the last field, and an empty argument list
            match = re.fullmatch(r"([\w\s*]*[\s*])(\w+)", declaration)
            if match is None:  # skipping the declaration would shift the others
                raise ValueError(f"cannot parse a declaration in the native kernels' headers: {declaration}")
            yield match[2], "".join(match[1].split())


def _structures() -> dict[str, type[ctypes.Structure]]:
    found = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", _CODE, re.DOTALL | re.MULTILINE):
        fields = [(field, _type_of(kind)) for field, kind in _declarations(body, ";")]
        found[name] = _TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _signatures() -> dict[str, tuple[Any, list[Any]]]:
    """Returns, by function name, the types of the result and of the arguments."""
    pointers = {f"{name}*": ctypes.POINTER(structure) for name, structure in vars(structures).items()}
    found = {}
    for result, name, text in re.findall(
        r"^OUTRIDER_API ([\w\s*]+[\s*])(\w+)\((.*?)\);", _CODE, re.DOTALL | re.MULTILINE
    ):
        arguments = [pointers.get(kind) or _type_of(kind) for _, kind in _declarations(text, ",")]
        found[name] = _type_of("".join(result.split())), arguments
    return found


structures: Any = SimpleNamespace(**_structures())
"""The structures by their C names. Pointers in them are addresses, which do not keep memory alive."""
SIGNATURES = _signatures()


def layout_of(structure: type[ctypes.Structure]) -> struct.Struct:
    """Returns the layout of a structure without inner ones, to pack all fields in one call. 0: a null pointer."""
    return struct.Struct("@" + "".join(kind._type_ for _, kind in structure._fields_))  # type: ignore[union-attr,misc]


def address_of(values: np.ndarray | None) -> int | None:
    """Returns the address of a contiguous array's data; None for None."""
    return None if values is None else values.ctypes.data


def declare(functions: ctypes.CDLL) -> None:
    """Sets the functions' signatures, so that calls are checked and raise MemoryError for a status other than 0."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
        if result is _Status:
            function.errcheck = _check_status


def _check_status(status: _Status, function: Any, _arguments: object) -> None:
    if status.value:
        raise MemoryError(f"{function.__name__}: {os.strerror(status.value)}")
