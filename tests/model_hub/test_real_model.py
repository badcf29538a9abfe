"""The default model: our paged forward gives the tokens of transformers' generate."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from outrider.constraints.grammar import NUMERICS
from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.input_batch import SequenceRows
from outrider.engine.numerics import KERNELS_REVISION
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.open import open_model
from tests.support.cached_runner import CachedRunner

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

NATIVE = choose_kernels()
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nExplain in a few paragraphs how a bicycle stays upright.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def loaded():
    """The model as nodes open it, from packed weights if there are any."""
    return open_model(ModelConfig())


@pytest.fixture(scope="module")
def num_tokens(is_full):
    """The number of tokens of each answer."""
    return 200 if is_full else 45


def decode(loaded, prompt, *, num_rows, num_tokens):
    """Returns the greedy tokens after `prompt` and their logits. A step has `num_rows` rows: one token, and drafts."""
    node, blocks = CachedRunner(loaded), range(63, -1, -1)
    node.prefill(prompt[:-1], blocks, num_logits=0)
    token_ids, logits_of_steps = list(prompt), []
    while len(token_ids) < len(prompt) + num_tokens:
        rows = [token_ids[-1], *[1234] * (num_rows - 1)]  # the drafts are wrong
        logits = node.forward(SequenceRows(rows, len(token_ids) - 1, blocks, num_rows))[0]
        logits_of_steps.append(logits)
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :], torch.stack(logits_of_steps)


@pytest.fixture(scope="module")
def generated(loaded, num_tokens):
    """The prompt's ids, and the ids that transformers generates after it in float32."""
    prompt = Tokenizer.from_file(str(loaded.directory / "tokenizer.json")).encode(PROMPT).ids
    theirs = AutoModelForCausalLM.from_pretrained(loaded.directory, dtype=torch.float32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would be very slow if other processes use the cores
    with torch.inference_mode():
        answer = theirs.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
        )[0, len(prompt) :].tolist()
    torch.set_num_threads(num_threads)
    return prompt, answer


@pytest.fixture(scope="module", params=["auto", "torch"])
def loaded_in_float32(request):
    return load_model(ModelConfig(max_model_len=1024, dtype="float32", kernels=request.param))


def test_greedy_tokens_are_those_of_transformers_generate(loaded_in_float32, generated, num_tokens, is_full):
    loaded, (prompt, expected) = loaded_in_float32, generated
    if not (loaded.cpu_kernels or is_full):
        num_tokens //= 3  # torch takes five times as long as the native kernels
        expected = expected[:num_tokens]
    # min_new_tokens bans the end of text in `generate`, but not here, so tokens are compared up to it.
    end = next((i for i, token in enumerate(expected) if token in loaded.info.eos_token_ids), num_tokens)
    for num_rows in (1, 5):
        ours, logits = decode(loaded, prompt, num_rows=num_rows, num_tokens=num_tokens)
        stop = next((i for i, token in enumerate(ours) if token in loaded.info.eos_token_ids), end)
        parted = next((i for i in range(min(end, stop)) if ours[i] != expected[i]), None)
        best = logits[parted or 0].topk(2).values
        assert parted is None, (
            f"{num_rows} rows: token {parted} differs, its best two are {best[0] - best[1]:.2g} apart"
        )
        assert min(end, stop) == num_tokens, "the prompt must be one that is answered at length"


@pytest.mark.skipif(NATIVE.library is None, reason=str(NATIVE))
def test_in_bfloat16_logits_are_the_same_bits_with_drafts_and_without(loaded, num_tokens):
    assert (loaded.info.dtype, loaded.info.numerics) == (
        "bfloat16",
        f"exact ({NATIVE.arithmetic} {KERNELS_REVISION}, {NUMERICS})",
    )
    prompt = Tokenizer.from_file(str(loaded.directory / "tokenizer.json")).encode(PROMPT).ids
    alone, alone_logits = decode(loaded, prompt, num_rows=1, num_tokens=num_tokens)
    drafted, drafted_logits = decode(loaded, prompt, num_rows=5, num_tokens=num_tokens)
    assert alone == drafted
    assert torch.equal(alone_logits, drafted_logits)


def test_identity_of_the_default_model(loaded):
    assert loaded.info.name == "smollm2-135m-instruct"
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
