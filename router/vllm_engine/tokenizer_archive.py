"""The tokenizer's files as a zip, for gateways that do not share a disk with the nodes."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    data: bytes
    sha256: str  # of data, hexadecimal

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """(at most `CHUNK_BYTES`, the hash with the last chunk and "" before)."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if is_last else ""


def make_archive(files: Mapping[str, bytes]) -> TokenizerArchive:
    """Equal files make equal archives: by name, without times. Compresses some MB: call it in a thread."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
