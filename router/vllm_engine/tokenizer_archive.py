"""The tokenizer's files as a zip, for gateways that do not share a disk with the nodes."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 64 << 10
NORMALISES_MESSAGES = Path(__file__).with_name("messages.jinja").read_bytes()
"""Before the model's own template, which the gateway renders: for what clients leave out, it gives templates a null."""


def files_for_gateway(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files with which a gateway renders, encodes and decodes as the router does.

    It decodes an answer by itself, without the prompt before it: the first space is no mark of the text's start there.
    """
    changed = dict(files)
    if "chat_template.jinja" in changed:
        changed["chat_template.jinja"] = NORMALISES_MESSAGES + changed["chat_template.jinja"]
    description = json.loads(changed["tokenizer.json"])
    decoder = description.get("decoder") or {}
    for step in decoder.get("decoders", [decoder]):
        if step.get("type") == "Strip":
            step["start"] = 0
        elif step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
    changed["tokenizer.json"] = json.dumps(description, ensure_ascii=False).encode()
    return changed


def archive_chunks(files: Mapping[str, bytes]) -> list[Any]:
    """GetTokenizerChunks of at most `CHUNK_BYTES`; the last has the SHA-256 of all, in hexadecimal.

    Equal files make equal archives: by name, without times. Compresses some MB: call it in a thread.
    """
    files = files_for_gateway(files)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    starts = range(0, len(data), CHUNK_BYTES)
    chunks = [common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES]) for start in starts]
    chunks[-1].sha256 = hashlib.sha256(data).hexdigest()
    return chunks
