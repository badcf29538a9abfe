"""The engine on a GPU gives the same results as on a CPU, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention import make_attention_backend
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.model_runner import make_runner, warm_up
from outrider.engine.open_runner import profile_run
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.step_graphs import StepGraphs, cuda_graphs
from outrider.engine.torch_adapter import TorchAdapter
from outrider.model_hub.adapter_files import read_adapter
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from outrider.request import SamplingParams
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu

PROMPT = [(i * 7) % 250 + 20 for i in range(40)]


def attention_for(model, name="triton"):
    heads = {"num_heads": model.spec.num_heads, "num_kv_heads": model.spec.num_kv_heads}
    return make_attention_backend(name, model.device, model.spec.dtype, **heads)


def sampled_tokens(path, device, *, num_tokens=20):
    model = load_model(ModelConfig(id=str(path), device=device, dtype="float32"))
    cache = model.make_cache(256, 16)
    runner = make_runner(model, cache, attention_for(model, "auto"))
    sampler = Sampler(vocab_size=model.spec.vocab_size, known_token_ids=model.known_token_ids, device=model.device)
    state = sampler.start(
        SamplingParams(seed=3, max_tokens=num_tokens, temperature=0.8), sample=0, prompt_token_ids=PROMPT
    )
    tokens, computed = list(PROMPT), 0
    with torch.inference_mode():
        while len(tokens) < len(PROMPT) + num_tokens:
            rows = SequenceRows(tokens[computed:], computed, range(8), num_logits=1)
            logits = runner.forward(build_input_batch([rows], cache.block_size))
            (token,) = sampler.sample(logits, [SampleRows(state, len(tokens))]).token_ids
            computed = len(tokens)
            tokens.append(token)
            sampler.commit(state, [token])
    return tokens[len(PROMPT) :]


def test_sampled_tokens_are_the_cpus(tiny_model):
    assert sampled_tokens(tiny_model, "cuda") == sampled_tokens(tiny_model, "cpu")


def test_deterministic_mode_says_exact_after_rows_in_company_have_been_compared(tiny_model):
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="bfloat16", deterministic=True))
    assert model.info.numerics.startswith("exact (triton ")


def test_steps_as_graphs_have_the_same_logits(tiny_model):
    """Verification, decoding and draft trees, in batches that share a bucket."""
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="float32"))
    attention = attention_for(model)
    shapes = GraphShapes(16, has_trees=True)
    assert profile_run(model, attention, num_rows=64, block_size=16, graphs=shapes) > 0
    runners = []
    for graphs in (None, shapes):
        cache = model.make_cache(256, 16)
        runners.append(make_runner(model, cache, attention, graphs=graphs))
        warm_up(runners[-1], cache, model.spec.max_model_len)
    assert runners[1].padded_rows == (1, 2, 4, 8, 16)
    parts = [([1, 2, 3], 0), ([7], 3), ([8, 9, 4], 4, (-1, -1)), ([5], 7), ([5, 6, 7, 8, 9], 8)]
    for tokens, start, *parents in parts:
        rows = [
            SequenceRows(tokens, start, range(8), len(tokens), *parents),
            SequenceRows([6], 3 * (start > 0), range(8, 16), 1),
        ]
        plain, replayed = (runner.forward(build_input_batch(rows, 16)).clone() for runner in runners)
        torch.testing.assert_close(plain, replayed)


def test_a_prompt_as_a_graph_leaves_the_same_keys_and_values(tiny_model):
    """The next token's logits show them."""
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="float32"))
    found = []
    for graphs, padded_rows in ((None, ()), (GraphShapes(has_logits=False), (64, 128, 256))):
        cache, layers = model.make_cache(256, 16), []
        runner = make_runner(model, cache, attention_for(model), graphs=graphs)
        warm_up(runner, cache, model.spec.max_model_len)
        assert runner.padded_rows == padded_rows
        prompt = build_input_batch([SequenceRows(PROMPT, 0, range(8), 0)], 16)
        assert runner.forward(prompt, on_layer_done=layers.append).shape == (0, model.spec.vocab_size)
        assert layers == list(range(model.spec.num_layers))
        found.append(runner.forward(build_input_batch([SequenceRows([5], len(PROMPT), range(8), 1)], 16)).clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_a_fused_decoder_has_the_logits_of_modules(tmp_path, architecture):
    """This runs in bfloat16, which the interpreter does not support."""
    path = make_tiny_model(tmp_path / "model", architecture=architecture)
    model = load_model(ModelConfig(id=str(path), device="cuda", dtype="bfloat16"))
    assert str(model.kernels) == "fused Triton kernels"
    rows = [SequenceRows(PROMPT, 0, range(8), 40), SequenceRows(PROMPT[:7], 0, range(8, 16), 2)]
    found, expected = (
        make_runner(each, each.make_cache(16, 16), attention_for(model)).forward(build_input_batch(rows, 16))
        for each in (model, replace(model, fused=None))
    )
    assert float((found - expected).abs().max() / expected.abs().max()) < 0.05


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_with_an_adapter_have_the_logits_of_merged_weights(tiny_model, tmp_path, deterministic):
    """The other rows have the logits that they have without it, although a batch with adapters has no graph."""
    model = load_model(ModelConfig(id=str(tiny_model), device="cuda", dtype="float32", deterministic=deterministic))
    directory = make_adapter(tmp_path / "adapter", tiny_model, seed=1)
    adapter = TorchAdapter(
        model.model, read_adapter(directory).parts, device=model.device, is_deterministic=deterministic
    )
    own = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        merged = merge_adapter(own, directory)(torch.tensor([PROMPT])).logits[0]
    rows = [SequenceRows(PROMPT, 0, range(8), 40), SequenceRows(PROMPT, 0, range(8, 16), 40)]
    runner = make_runner(model, model.make_cache(16, 16), attention_for(model))
    expected = runner.forward(build_input_batch(rows, 16)).clone()
    found = runner.forward(build_input_batch([rows[0], rows[1]._replace(adapter=adapter)], 16))
    torch.testing.assert_close(found[:40], expected[:40], rtol=0.0, atol=0.0)
    torch.testing.assert_close(found[40:].cpu(), merged, rtol=1e-3, atol=1e-3 * float(merged.abs().max()))


@pytest.mark.parametrize(
    "wait",
    [lambda values: values.sum().item(), lambda _values: torch.cuda.synchronize()],
    ids=["before the capture", "within the capture"],
)
def test_what_cannot_be_captured_leaves_the_gpu_as_it_was(wait):
    """Steps run without graphs, other work goes on, and another forward can be captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    batch = build_input_batch([SequenceRows([1, 2, 3], 4, range(3), 3)], 4)

    def captured(forward):
        graphs = StepGraphs(
            GraphShapes(4), device=device, scratch_blocks=(8,), block_size=4, capture=cuda_graphs(device)
        )  # fmt: skip
        graphs.capture_all(forward)
        return graphs

    def positions(batch):
        return batch.on(device).positions.float().unsqueeze(1).expand(-1, 8).contiguous()

    def waits(batch):
        logits = positions(batch)
        wait(logits)
        return logits

    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        failed = captured(waits)
    assert failed.row_counts == ()
    assert failed.run(batch) is None
    assert torch.cuda.current_stream() == stream
    assert torch.ones(1 << 20, device=device).sum().item() == 1 << 20
    assert captured(positions).run(batch)[:, 0].tolist() == [4.0, 5.0, 6.0]
