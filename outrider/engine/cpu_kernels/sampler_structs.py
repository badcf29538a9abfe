"""The structures of the sampler's C interface (source/sampler_api.h) for Python, nothing else. Torch-free.

Objects that hold addresses do not keep the memory alive: whoever makes them does.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p


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
        ("masks", c_void_p),
        ("num_mask_words", c_int64),
        ("assumed_start", c_int64),
        ("num_assumed", c_int64),
        ("num_rows", c_int64),
        ("position", c_int64),
    )
