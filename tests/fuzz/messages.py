"""Random messages: any fields, extreme values, and bytes that were altered."""

from __future__ import annotations

import functools
import os
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Examples of each test in `make fuzz`. 0 means a short run with fixed seeds."""


def fuzzed(num_short: int) -> settings:
    """Returns the settings of a test. `num_short` is the number of its examples in the test suite."""
    return settings(
        max_examples=NUM_EXAMPLES or num_short,
        deadline=None,
        derandomize=not NUM_EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 9),
}
_TEXTS = st.text(max_size=12) | st.sampled_from(["", "fake-model", "text", "x" * 200, "[" * 5000, "\0", "é😀"])
_FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e-6, 2.0])


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.integers(max(low, -2), min(high, 300)) | st.sampled_from([low, high, 0, 1])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return _FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20) | st.sampled_from([bytes(16), b"\1" * 16, b"\2" * 16])
    return _TEXTS


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is None:
        one = _scalars(field)
    elif depth == 0:
        return st.just([] if field.is_repeated else {})
    else:
        one = _fields(field.message_type, depth - 1)
    if not field.is_repeated:
        return one
    return st.lists(one, max_size=4) | st.builds(lambda value, number: [value] * number, one, st.sampled_from([20, 70]))


@functools.cache
def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draws values by field name. Most fields are left out; in a oneof, only the last one counts."""
    choices = {
        field.name: st.none() | _values(field, depth)
        for field in descriptor.fields
        if not (field.message_type is not None and field.message_type.GetOptions().map_entry)
    }
    return st.fixed_dictionaries(choices).map(
        lambda values: {name: value for name, value in values.items() if value is not None}
    )


def messages(kind: type[Message], **given: Any) -> st.SearchStrategy[Message]:
    """Draws a message of this kind, with the given fields in place of drawn ones."""

    def make(values: dict[str, Any]) -> Message:
        return kind(**{**values, **given})

    return _fields(kind.DESCRIPTOR, depth=2).map(make)


@st.composite
def wire_bytes(draw: st.DrawFn, kind: type[Message], **given: Any) -> bytes:
    """Draws the bytes of a message of this kind, unchanged or altered."""
    data = bytearray(draw(messages(kind, **given)).SerializeToString())
    match draw(st.sampled_from(["whole", "whole", "flip", "cut", "insert"])):
        case "flip" if data:
            data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "insert":
            at = draw(st.integers(0, len(data)))
            data[at:at] = draw(st.binary(max_size=8))
    return bytes(data)
