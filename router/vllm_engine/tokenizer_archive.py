"""The tokenizer's files as a zip, for gateways that do not share a disk with the nodes."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Any

from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 64 << 10


def archive_chunks(files: Mapping[str, bytes]) -> list[Any]:
    """GetTokenizerChunks of at most `CHUNK_BYTES`; the last has the SHA-256 of all, in hexadecimal.

    Equal files make equal archives: by name, without times. Compresses some MB: call it in a thread.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    starts = range(0, len(data), CHUNK_BYTES)
    chunks = [common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES]) for start in starts]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks
