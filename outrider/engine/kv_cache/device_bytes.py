"""Bytes of a frame that never leave a GPU. Torch-free until there are any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.kv_cache.tensor_planes import CopyStream


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """What `CachePlane.read` gives, on the device of the cache. Every use is queued on one stream."""

    tensor: Tensor  # [num_bytes] uint8
    copies: CopyStream  # whose stream makes and uses them

    def __len__(self) -> int:
        return self.tensor.numel()

    def __bytes__(self) -> bytes:
        """A copy on the host, which waits for it."""
        return self.copies.download(self.tensor)

    def checksum(self) -> int:
        """As of `CopyStream.checksum`; the host waits for it."""
        return self.copies.checksum(self.tensor)
