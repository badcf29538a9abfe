"""The C interface of the kernels (source/api.h, source/sampler_api.h) for Python: structures, signatures. Torch-free.

One library for each instruction path has been built; a process loads one of them (paths.py
chooses). Calls release Python's lock unless they are told to hold it. Objects that hold pointers do not keep the memory
alive: whoever makes them does.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

from outrider.engine.step_clock import ForwardPhases
from outrider.errors import InternalError

API_VERSION = 11


class ElementType(IntEnum):
    """Of weights, activations, keys and values."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # of weights; their products round activations too


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("type", c_int32),
    )


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("num_logits", c_int64),
        ("num_seqs", c_int64),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_rows", c_void_p),
        ("path_starts", c_void_p),
        ("path_slots", c_void_p),
        ("features", c_void_p),
    )


class AttentionStruct(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sliding_window", c_int64),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class PanelsStruct(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("num_layers", c_int64),
        ("layer_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("type", c_int32),
        ("are_values", c_int32),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("sliding_window", c_int64),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab_size", c_int64),
        ("scaling", c_float),
        ("epsilon", c_float),
        ("type", c_int32),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", MatrixStruct),
        ("layers", POINTER(LayerStruct)),
        ("feature_norm", c_void_p),
        ("begins_normalised", c_int32),
        ("keeps_normalised", c_int32),
    )


class FeaturesStruct(ctypes.Structure):
    _fields_ = (
        ("num_taps", c_int64),
        ("taps", POINTER(c_int64)),
        ("takes_final_norm", c_int32),
        ("epsilon", c_float),
        ("tap_norms", c_void_p),
        ("norm", c_void_p),
        ("projection", MatrixStruct),
        ("plane", c_void_p),
    )


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


class _Status(c_int32):
    """0, or the errno of what went wrong."""


def _check_status(status: _Status, function: Any, _arguments: object) -> None:
    if status.value:
        raise MemoryError(f"{function.__name__}: {os.strerror(status.value)}")


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "outrider_api_version": (c_int32, ()),
    "outrider_path": (c_char_p, ()),
    "outrider_prepare_process": (c_int32, ()),
    "outrider_team_create": (c_void_p, (c_int32,)),
    "outrider_team_free": (None, (c_void_p,)),
    "outrider_workspace_create": (c_void_p, ()),
    "outrider_workspace_free": (None, (c_void_p,)),
    "outrider_workspace_measure": (None, (c_void_p, c_int32)),
    "outrider_workspace_take_times": (None, (c_void_p, c_void_p)),
    "outrider_packed_size": (c_int64, (c_int32, c_int64, c_int64)),
    "outrider_pack": (
        _Status,
        (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int32, c_void_p),
    ),
    "outrider_unpack_row": (_Status, (POINTER(MatrixStruct), c_int64, c_void_p)),
    "outrider_linear": (
        _Status,
        (c_void_p, c_void_p, c_int32, c_void_p, c_int64, POINTER(MatrixStruct), c_void_p),
    ),
    "outrider_rms_norm": (_Status, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p)),
    "outrider_paged_attention": (
        _Status,
        (
            c_void_p,
            c_void_p,
            c_int32,
            POINTER(AttentionStruct),
            POINTER(BatchStruct),
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
        ),
    ),
    "outrider_write_rows": (None, (POINTER(PanelsStruct), c_int64, c_int64, c_void_p, c_int64, c_void_p)),
    "outrider_read_rows": (None, (POINTER(PanelsStruct), c_int64, c_int64, c_void_p, c_int64, c_void_p)),
    "outrider_decoder_layers": (
        _Status,
        (
            c_void_p,
            c_void_p,
            POINTER(DecoderStruct),
            POINTER(BatchStruct),
            POINTER(c_void_p),
            POINTER(c_void_p),
            POINTER(FeaturesStruct),
            c_int64,
            c_int64,
        ),
    ),
    "outrider_decoder_logits": (
        _Status,
        (
            c_void_p,
            c_void_p,
            POINTER(DecoderStruct),
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
        ),
    ),
    "outrider_sampler_create": (c_void_p, (c_void_p, c_int64, c_int64, c_void_p, c_int64)),
    "outrider_sampler_free": (None, (c_void_p,)),
    # Structures of a step's rows come as addresses: making a pointer object takes longer than a short call.
    "outrider_sample": (_Status, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p)),
    "outrider_arrivals": (_Status, (c_uint64, c_uint32, c_uint32, c_int64, c_void_p)),
    "outrider_logarithms": (_Status, (c_void_p, c_int64, c_void_p)),
    "outrider_masses": (_Status, (c_void_p, c_int64, c_float, c_void_p)),
    "outrider_turns_size": (c_int64, ()),
    "outrider_turns_slots": (c_int32, ()),
    "outrider_turns_take": (c_int32, (c_void_p, c_int32, c_int64, c_int64)),
    "outrider_turns_keep": (c_int32, (c_void_p, c_int32, c_int64)),
    "outrider_turns_is_wanted": (c_int32, (c_void_p, c_int32)),
    "outrider_turns_give": (None, (c_void_p, c_int32, c_int64)),
}


def _declare(functions: ctypes.CDLL) -> None:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = arguments
        if result is _Status:
            function.errcheck = _check_status


class KernelLibrary:
    """A loaded library. `functions.outrider_…` are its C functions, checked by signature.

    Those that compute raise MemoryError when scratch memory cannot be had.
    """

    def __init__(self, file: Path) -> None:
        """Raises OSError when the file cannot be loaded, InternalError when it is of another version."""
        self.file = file
        self.functions = ctypes.CDLL(str(file))
        version = self.functions.outrider_api_version()  # first: another version may lack other functions
        if version != API_VERSION:
            raise InternalError(f"{file} has interface {version}, this version needs {API_VERSION}")
        handle = self.functions._handle  # noqa: SLF001 documented: only its name keeps clear of functions'
        self.functions_holding_lock = ctypes.PyDLL(str(file), handle=handle)
        """The same without giving up Python's lock, for calls that are over in no time."""
        for functions in (self.functions, self.functions_holding_lock):
            _declare(functions)
        self.path: str = self.functions.outrider_path().decode()
        """The instruction path, such as "portable"."""


def free_with(owner: object, free: Callable[[int], object], handle: int) -> None:
    """Frees what the handle stands for when its owner is gone. Not when the process ends: a thread may use it still."""
    weakref.finalize(owner, free, handle).atexit = False


class Team:
    """Threads that compute together: the caller and `num_threads` - 1 others, which sleep between jobs.

    One job at a time: it belongs to the thread that runs the engine.
    """

    def __init__(self, library: KernelLibrary, num_threads: int) -> None:
        """Raises MemoryError when the system gives the process no more threads."""
        self.num_threads = num_threads
        self.handle: int = library.functions.outrider_team_create(num_threads)
        if not self.handle:
            raise MemoryError(f"{num_threads} threads for native kernels cannot be had")
        free_with(self, library.functions.outrider_team_free, self.handle)


STEP_PHASES = ("linear", "attention", "norm", "rope", "head")
"""By OutriderPhase: what a native decoder's step spends its time on."""


class Workspace(ForwardPhases):
    """Scratch memory of one runner; grows to its largest step. A native decoder counts the time of its steps there."""

    def __init__(self, library: KernelLibrary) -> None:
        self._functions = library.functions
        self.handle: int = library.functions.outrider_workspace_create()
        if not self.handle:
            raise MemoryError("no memory for a workspace of the native kernels")
        free_with(self, library.functions.outrider_workspace_free, self.handle)

    def start(self) -> None:
        self.take()
        self._functions.outrider_workspace_measure(self.handle, 1)

    def stop(self) -> None:
        self._functions.outrider_workspace_measure(self.handle, 0)

    def take(self) -> dict[str, int]:
        """By name of STEP_PHASES."""
        spent = (c_int64 * len(STEP_PHASES))()
        self._functions.outrider_workspace_take_times(self.handle, spent)
        return dict(zip(STEP_PHASES, spent, strict=True))
