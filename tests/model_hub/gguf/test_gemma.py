"""Checks with Gemma 3 270M, whose terms of use forbid to keep it here: OUTRIDER_GEMMA_GGUF names the file."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.model_hub.gguf.header import read_header
from outrider.model_hub.gguf.tensors import read_rows
from tests.model_hub.gguf.test_families import load
from tests.support.tiny_gguf import open_gguf

GEMMA = os.environ.get("OUTRIDER_GEMMA_GGUF", "")
pytestmark = pytest.mark.skipif(not GEMMA, reason="OUTRIDER_GEMMA_GGUF names no file")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_gguf(Path(GEMMA), tmp_path_factory.mktemp("cache"))


def test_every_quantised_tensor_has_the_bits_of_the_gguf_package(checkpoint):
    content = np.memmap(GEMMA, np.uint8, "r")
    entries = {entry.name: entry for entry in read_header(Path(GEMMA)).tensors}
    quantised = {name: tensor for name, tensor in checkpoint.tensors.items() if isinstance(tensor, GroupedWeight)}
    assert len(quantised) == 127
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    for name, tensor in quantised.items():
        entry = entries[names.get_name(name, try_suffixes=(".weight",))]
        expected = gguf.dequantize(read_rows(content, entry), gguf.GGMLQuantizationType(entry.type))
        np.testing.assert_array_equal(tensor.dequantise(), expected)


def test_it_continues_texts_sensibly(checkpoint):
    model, tokenizer = load(checkpoint), Tokenizer.from_file(str(checkpoint.directory / "tokenizer.json"))
    token_ids = tokenizer.encode("The three primary colors are").ids
    answer = model.generate(torch.tensor([token_ids]), max_new_tokens=8, do_sample=False)[0, len(token_ids) :]
    assert tokenizer.decode(answer.tolist()).startswith(" red, blue, and yellow.")
