"""The default model: what it is called, and its tokenizer. docs/models.md has what it computes."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.open import open_model
from tests.families.compared import TEXT
from tests.support.cached_runner import CachedRunner

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

NATIVE = choose_kernels()


@pytest.fixture(scope="module")
def loaded():
    """The model as nodes open it, from packed weights if there are any."""
    return open_model(ModelConfig())


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_torch_prefers_the_tokens_that_transformers_generates():
    """docs/models.md has what native kernels prefer."""
    loaded = load_model(ModelConfig(max_model_len=1024, dtype="float32", kernels="torch"))
    prompt = Tokenizer.from_file(str(loaded.directory / "tokenizer.json")).encode(TEXT).ids
    theirs = AutoModelForCausalLM.from_pretrained(loaded.directory, dtype=torch.float32)
    with torch.inference_mode():
        text = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)[0].tolist()
    node = CachedRunner(loaded)
    logits = node.prefill(text[:-1], node.table(len(text)), chunk=50)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == text[len(prompt) :]


def test_identity_of_the_default_model(loaded):
    assert loaded.info.name == "smollm2-135m-instruct"
    assert loaded.info.dtype == ("bfloat16" if NATIVE.library else "float32")
    assert loaded.info.eos_token_ids == (2,)
    assert (loaded.info.vocab_size, int(loaded.known_token_ids.sum())) == (49152, 49152)
    config = json.loads(loaded.tokenizer_files["tokenizer_config.json"])
    assert config["eos_token"] == "<|im_end|>"
    assert b"add_generation_prompt" in loaded.tokenizer_files["chat_template.jinja"]


@pytest.mark.parametrize("text", ["I paid $3.50 in 2024 for v2.", "naïve  spaces\n\n\tand tabs", "x²+½ ٣"])
def test_the_tokenizer_returns_what_it_was_given(loaded, text):
    tokenizer = Tokenizer.from_file(str(loaded.directory / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(len(tokenizer.decode([token])) == 1 for token in ids if tokenizer.decode([token]).strip().isdigit())
