"""A GPU that computes nothing: torch's FakeTensorMode knows devices and shapes, but no values.

Two things are errors here that would only be slow on a real GPU: an operation whose tensors are on two devices, and
an operation that makes the host wait for the device.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda:0")

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@contextlib.contextmanager
def fake_gpu(monkeypatch):
    """Makes all tensors fake that are created within the block. Enter OneDevice where its rules must apply."""
    pinned = []  # keeps tensors alive, so that no id is used twice

    def pin(tensor):
        tensor.constant = None  # otherwise torch would compute with a single number's real value
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)  # FakeTensorMode has none
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is each for each in pinned))
    # Only the Python bindings of these operations look for the real device, which a torch without CUDA does not have.
    monkeypatch.setattr(torch.Tensor, "copy_", _copy)
    monkeypatch.setattr(torch.Tensor, "__getitem__", _get_item)
    monkeypatch.setattr(torch.Tensor, "__setitem__", _set_item)
    monkeypatch.setattr(torch.Tensor, "numpy", _numpy)
    monkeypatch.setattr(torch.Tensor, "contiguous", _contiguous)
    fake_streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_of", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(multi_processor_count=4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def fake_streams(monkeypatch):
    """Replaces streams and events by ones that do nothing, and returns the list of their calls, in order."""
    log = []

    class Stream:
        def __init__(self, _device, name="copies"):
            self.name = name

    class Event:
        def __init__(self, *, blocking=False):
            pass

        def record(self, stream):
            self.place = stream.name
            log.append(f"event in {self.place}")

        def synchronize(self):
            log.append(f"host waits for {self.place}")

    default = Stream(GPU, "default")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: default)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    return log


def _copy(tensor, source, non_blocking=False):
    return torch.ops.aten.copy_(tensor, source, non_blocking)


def _contiguous(tensor, **_options):
    if tensor.is_contiguous():
        return tensor
    return torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


_own_numpy = torch.Tensor.numpy


def _numpy(tensor):
    with unset_fake_temporarily():  # otherwise the result is a fake view of a real tensor, with arbitrary memory
        return _own_numpy(tensor)


_own_get_item = torch.Tensor.__getitem__


def _get_item(tensor, key):
    """Computes tensor[key] by operations, for numbers, slices, None, an ellipsis and ids."""
    if tensor.device.type != "cuda":
        return _own_get_item(tensor, key)
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        place = keys.index(Ellipsis)
        keys[place : place + 1] = [slice(None)] * (tensor.dim() - sum(each is not None for each in keys) + 1)
    dim = 0
    for each in keys:
        if isinstance(each, int):
            tensor = tensor.select(dim, each)
            continue
        if each is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(each, torch.Tensor) and each.dtype is torch.int64:
            tensor = tensor.index_select(dim, each)
        else:
            assert isinstance(each, slice), f"not stood in for: {each!r}"
            tensor = torch.ops.aten.slice(tensor, dim, each.start, each.stop, each.step or 1)
        dim += 1
    return tensor


_own_set_item = torch.Tensor.__setitem__


def _set_item(tensor, key, value):
    """Performs tensor[key] = value by operations, for a whole tensor and for ids of its first dimensions."""
    if tensor.device.type != "cuda":
        _own_set_item(tensor, key, value)
    elif isinstance(key, slice) and key == slice(None):
        tensor.copy_(value)
    else:
        keys = list(key) if isinstance(key, tuple) else [key]
        assert all(isinstance(each, torch.Tensor) and each.dtype is torch.int64 for each in keys), "not stood in for"
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        torch.ops.aten.index_put_(tensor, keys, value)


class OneDevice(TorchDispatchMode):
    """Refuses operations that make the host wait for the GPU, or that mix devices (torch allows it for numbers).

    A copy to the GPU waits for all earlier work, unless it comes from page-locked memory and is non-blocking.
    With `takes_frames`, copies to page-locked memory are allowed too, since their reader waits for an event.
    """

    def __init__(self, *, takes_frames=False):
        super().__init__()
        self._takes_frames = takes_frames

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before, after = devices_of((args, kwargs)), devices_of(result)
        if function in _COPIES and before | after == {"cpu", "cuda"}:
            source = args[1] if function is torch.ops.aten.copy_.default else args[0]
            to_host = source.device.type == "cuda"
            assert self._takes_frames or not to_host, f"{function} reads from the GPU"
            assert (kwargs or {}).get("non_blocking") or args[2:3] == (True,), f"{function} waits for the GPU"
            on_host = args[0] if to_host else source
            assert on_host.is_pinned(), f"{function} waits for the GPU: it is from or to pageable memory"
            return result
        assert not (before == {"cuda"} and after == {"cpu"}), f"{function} reads from the GPU"
        assert len(before) <= 1, f"{function} mixes devices"
        return result


def devices_of(tensors):
    return {each.device.type for each in tree_leaves(tensors) if isinstance(each, torch.Tensor)}


def are_aligned(tensors):
    """Returns whether each tensor begins at a multiple of 16 bytes, as memory from torch's allocator does.

    Triton compiles a kernel for each new alignment of its arguments, which takes seconds within a step.
    """
    each_tensor = (each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))
    return all(each.storage_offset() * each.itemsize % 16 == 0 for each in each_tensor)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **_options):
    """Replaces flash-attn, which FakeTensorMode does not know. Maximum lengths are numbers; tensors are on the GPU."""
    assert isinstance(max_seqlen_q, int)
    assert isinstance(max_seqlen_k, int)
    assert {each.device for each in (q, k, v, cu_seqlens_q, cu_seqlens_k)} == {GPU}
    assert {each.dtype for each in (cu_seqlens_q, cu_seqlens_k)} == {torch.int32}
    return torch.empty_like(q)


class Kernel:
    """Replaces a Triton kernel, which FakeTensorMode does not know. All of its tensors are on the GPU."""

    compiled: ClassVar = set()
    """Each kernel with the constants of its launches."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)

        def launch(*arguments, **constants):
            assert devices_of((arguments, constants)) == {"cuda"}
            assert are_aligned(arguments)
            self.compiled.add((self.name, *sorted(constants.items())))

        return launch


class Operations(TorchDispatchMode):
    """Records the operations that have a result on the GPU."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "cuda" in devices_of(result):
            self.names.add(str(function))
        return result
