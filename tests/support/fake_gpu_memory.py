"""The memory of a GPU that several processes share, as torch reports it. Each process is a thread here."""

from __future__ import annotations

import threading
from collections import Counter

import torch


class FakeGpuMemory:
    """Replaces torch.cuda's functions. `take` and `free` do what torch's allocator would do in a process."""

    def __init__(self, total_bytes, *, context_bytes=500 << 20):
        self.total_bytes = total_bytes
        self._context_bytes = context_bytes
        self._lock = threading.Lock()
        self._reserved, self._cached, self._peaks = Counter(), Counter(), Counter()
        self._contexts = set()
        self.min_free = total_bytes

    def patch(self, monkeypatch):
        for name in ("mem_get_info", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)

    def begin(self):
        """Starts a process that uses the GPU."""
        with self._lock:
            self._contexts.add(threading.current_thread())

    def take(self, num_bytes):
        """Allocates cached bytes first, then new ones. Raises: torch.OutOfMemoryError."""
        own = threading.current_thread()
        with self._lock:
            self._contexts.add(own)
            fresh = max(num_bytes - self._cached[own], 0)
            if fresh > self._free():
                raise torch.OutOfMemoryError(f"{num_bytes:,} bytes wanted, {self._free():,} free")
            self._cached[own] -= num_bytes - fresh
            self._reserved[own] += fresh
            self._peaks[own] = max(self._peaks[own], self._reserved[own])
            self.min_free = min(self.min_free, self._free())

    def free(self, num_bytes):
        """Frees bytes, which stay reserved until `empty_cache`."""
        with self._lock:
            self._cached[threading.current_thread()] += num_bytes

    def _free(self):
        return self.total_bytes - sum(self._reserved.values()) - len(self._contexts) * self._context_bytes

    def mem_get_info(self, _device):
        self.begin()
        with self._lock:
            return self._free(), self.total_bytes

    def memory_reserved(self, _device):
        return self._reserved[threading.current_thread()]

    def max_memory_reserved(self, _device):
        return self._peaks[threading.current_thread()]

    def reset_peak_memory_stats(self, _device):
        self._peaks[threading.current_thread()] = self._reserved[threading.current_thread()]

    def empty_cache(self):
        own = threading.current_thread()
        with self._lock:
            self._reserved[own] -= self._cached.pop(own, 0)


class Properties:
    uuid = "0123-4567"
