"""The C interface of the sampler (source/sampler_api.h) for Python: structures, signatures, nothing else. Torch-free.

Objects that hold addresses do not keep the memory alive: whoever makes them does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from outrider.engine.cpu_kernels.library import KernelLibrary


class SamplingStruct(ctypes.Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("num_generated", c_int64),
        ("min_tokens", c_int64),
        ("stop_ids", c_void_p),
        ("num_stop_ids", c_int64),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("num_biases", c_int64),
        ("counted_ids", c_void_p),
        ("counts", c_void_p),
        ("num_counted", c_int64),
        ("sample", c_uint32),
        ("temperature", c_float),
        ("log_min_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("has_penalties", c_int32),
        ("is_greedy", c_int32),
    )


class SampleRowsStruct(ctypes.Structure):
    _fields_ = (
        ("sampling", c_void_p),
        ("assumed_start", c_int64),
        ("num_assumed", c_int64),
        ("num_rows", c_int64),
        ("position", c_int64),
    )


_SAMPLE_ARGUMENTS = (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p)


class SamplerFunctions:
    """The functions of sampler_api.h with their types, by their names there without the prefix."""

    def __init__(self, library: KernelLibrary) -> None:
        functions = library.functions
        self.create = _typed(functions.outrider_sampler_create, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64)
        self.free = _typed(functions.outrider_sampler_free, None, c_void_p)
        self.sample = _typed(functions.outrider_sample, None, *_SAMPLE_ARGUMENTS)
        self.sample_holding_lock = ctypes.PYFUNCTYPE(None, *_SAMPLE_ARGUMENTS)(_address(functions.outrider_sample))
        """The same without giving up Python's lock, for calls that are over in no time."""
        self.arrivals = _typed(functions.outrider_arrivals, None, c_uint64, c_uint32, c_uint32, c_int64, c_void_p)
        self.logarithms = _typed(functions.outrider_logarithms, None, c_void_p, c_int64, c_void_p)
        self.masses = _typed(functions.outrider_masses, None, c_void_p, c_int64, c_float, c_void_p)


def _typed(function: Any, result: type[c_void_p] | None, *arguments: Any) -> Callable[..., Any]:
    return ctypes.CFUNCTYPE(result, *arguments)(_address(function))


def _address(function: Any) -> int:
    address = ctypes.cast(function, c_void_p).value
    assert address is not None
    return address
