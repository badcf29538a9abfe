"""The engine on a GPU gives what it gives on a CPU, in float32."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

PROMPT = [(i * 7) % 250 + 20 for i in range(40)]


def sampled_tokens(path, device, *, num_tokens=20):
    import torch

    from outrider.engine.attention import make_attention_backend
    from outrider.engine.input_batch import SequenceRows, build_input_batch
    from outrider.engine.kv_cache.config import KVCacheConfig
    from outrider.engine.kv_cache.paged_cache import PagedKVCache
    from outrider.engine.model_runner import ModelRunner
    from outrider.engine.sampler import Sampler, SampleRows
    from outrider.model_hub.config import ModelConfig
    from outrider.model_hub.load import load_model
    from outrider.request import SamplingParams

    model = load_model(ModelConfig(id=str(path), device=device, dtype="float32"))
    attention = make_attention_backend("auto", model.device, model.spec.dtype)
    block_size = attention.block_size(None)
    cache = PagedKVCache.sized_for(
        model.spec, KVCacheConfig(num_blocks=256), block_size=block_size, device=model.device
    )
    runner = ModelRunner(model, cache, attention)
    sampler = Sampler(vocab_size=model.spec.vocab_size, known_token_ids=model.known_token_ids, device=str(model.device))
    state = sampler.start(
        SamplingParams(seed=3, max_tokens=num_tokens, temperature=0.8), sample=0, prompt_token_ids=PROMPT
    )
    tokens, computed = list(PROMPT), 0
    with torch.inference_mode():
        while len(tokens) < len(PROMPT) + num_tokens:
            rows = SequenceRows(tokens[computed:], computed, range(8), num_logits=1)
            logits = runner.forward(build_input_batch([rows], block_size))
            (token,) = sampler.sample(logits, [SampleRows(state, len(tokens))]).token_ids
            computed = len(tokens)
            tokens.append(token)
            sampler.commit(state, [token])
    return tokens[len(PROMPT) :]


def test_sampled_tokens_are_the_cpus(tiny_model):
    assert sampled_tokens(tiny_model, "cuda") == sampled_tokens(tiny_model, "cpu")


def test_deterministic_mode_says_exact_after_rows_in_company_have_been_compared(tiny_model):
    from outrider.model_hub.config import ModelConfig
    from outrider.model_hub.load import load_model

    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="bfloat16", deterministic=True))
    assert model.info.numerics.startswith("exact (triton ")
