"""Adapters (LoRA) in the native decoder: logits are those of merged weights, and base rows keep their bits."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.adapter import NativeAdapter
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.low_rank import LowRank
from outrider.errors import ModelError
from outrider.model_hub.adapter_files import read_adapter
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.engine.cpu_kernels.libraries import with_few_for_tests
from tests.engine.cpu_kernels.operations import differing_rows
from tests.support.adapters import TARGETS, make_adapter, merge_adapter
from tests.support.packed_decoder import pack_decoder
from tests.support.tiny_model import make_tiny_model

SHAPE = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj")
FAMILIES = {"llama": TARGETS, "qwen2": TARGETS, "gemma3_text": TARGETS, "phi3": FUSED}
"""Targets of adapters, by family: Gemma normalises outputs, and Phi-3 has joined layers."""
BLOCK_SIZE, NUM_BLOCKS = 16, 16
TABLES = (range(3), range(3, 6), range(6, 9), range(9, 12))
TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    @functools.cache
    def checkpoint(family):
        overrides = {
            name: value for name, value in SHAPE.items() if name != "head_dim" or family not in ("qwen2", "phi3")
        }
        return make_tiny_model(tmp_path_factory.mktemp(family), architecture=family, overrides=overrides)

    return checkpoint


@pytest.fixture(scope="session")
def checkpoint(checkpoints):
    return checkpoints("llama")


@pytest.fixture(scope="session")
def adapters(checkpoint, tmp_path_factory):
    """Directories: one adapter of all layers, one of some, with another rank in one of joined layers."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(folder / "all", checkpoint, seed=1, rank=5),
        make_adapter(folder / "some", checkpoint, seed=2, rank=3, targets=("k_proj", "up_proj", "down_proj")),
    ]


def load(directory, dtype, attention=ATTENTION_NAME):
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="session")
def decoders(checkpoints, teams):
    @functools.cache
    def decoder(library, dtype, quantise, family="llama"):
        model = copy.deepcopy(load(checkpoints(family), dtype))
        spec, _ = describe_decoder(model, dtype=str(dtype).removeprefix("torch."), window=resolve_window(model.config))
        weights = pack_decoder(teams(library, 1), model, spec, quantise=quantise)
        return NativeDecoder(teams(library, 1), weights), spec

    return decoder


def runner(decoder, spec, kernels):
    decoder.kernels = kernels
    cache = PagedKVCache(
        spec.planes, layer_groups=spec.layer_groups, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernels=kernels
    )
    return NativeStep(decoder, cache)


def logits_of(step, *sequences):
    """Returns the logits of all rows. `sequences`: (first position, number of rows, block table, adapter)."""
    rows = [
        SequenceRows(TOKENS[first : first + num], first, list(table), num, adapter=adapter)
        for first, num, table, adapter in sequences
    ]
    logits = torch.from_numpy(step.forward(build_input_batch(rows, BLOCK_SIZE)))
    return logits.split([num for _, num, _, _ in sequences])


def check_bits_in_random_batches(decoder, spec, team, of_rows):
    """Checks that rows of all adapters in random batches have the bits that they have alone.

    `team(num_threads)` → CpuKernels; `of_rows`: the adapter of each of four sequences, None in the first and the last.
    """
    alone = []
    for table, adapter in zip(TABLES, of_rows, strict=True):
        step = runner(decoder, spec, team(1))
        alone.append(torch.cat([logits_of(step, (row, 1, table, adapter))[0] for row in range(len(TOKENS))]))
    assert differing_rows(alone[0], alone[3]) == []
    assert len(differing_rows(alone[0], alone[1])) == len(TOKENS)
    assert len(differing_rows(alone[0], alone[2])) == len(TOKENS)
    for seed in range(3):
        choose, done = random.Random(seed), [0] * len(TABLES)
        step = runner(decoder, spec, team(1 + seed))
        while left := [index for index, num in enumerate(done) if num < len(TOKENS)]:
            chosen = choose.sample(left, choose.randint(1, len(left)))
            numbers = [min(choose.choice([1, 3, 17]), len(TOKENS) - done[index]) for index in chosen]
            parts = [
                (done[index], num, TABLES[index], of_rows[index]) for index, num in zip(chosen, numbers, strict=True)
            ]
            for index, num, logits in zip(chosen, numbers, logits_of(step, *parts), strict=True):
                assert differing_rows(logits, alone[index][done[index] : done[index] + num]) == []
                done[index] += num


@pytest.mark.parametrize(
    ("library", "family"), with_few_for_tests({name: (name,) for name in FAMILIES}, ("llama",)), indirect=["library"]
)
def test_logits_are_those_of_merged_weights(library, teams, decoders, checkpoints, tmp_path, family):
    decoder, spec = decoders(library, torch.float32, "", family)
    for number, targets in enumerate((FAMILIES[family], FAMILIES[family][1:])):
        directory = make_adapter(tmp_path / str(number), checkpoints(family), seed=number, rank=5, targets=targets)
        merged = merge_adapter(load(checkpoints(family), torch.float32, "eager"), directory)
        expected = merged(torch.tensor([TOKENS])).logits[0]
        adapter = NativeAdapter(decoder.weights.shape, read_adapter(directory).parts)
        found = logits_of(runner(decoder, spec, teams(library, 2)), (0, len(TOKENS), TABLES[0], adapter))[0]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_logits_are_those_of_peft(library, teams, decoders, checkpoint, adapters):
    peft = pytest.importorskip("peft")
    decoder, spec = decoders(library, torch.float32, "")
    for directory in adapters:
        model = peft.PeftModel.from_pretrained(load(checkpoint, torch.float32, "eager"), directory)
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
        adapter = NativeAdapter(decoder.weights.shape, read_adapter(directory).parts)
        found = logits_of(runner(decoder, spec, teams(library, 2)), (0, len(TOKENS), TABLES[0], adapter))[0]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("library", "family"),
    with_few_for_tests({name: (name,) for name in ("gemma3_text", "phi3")}, ()),
    indirect=["library"],
)
def test_bits_do_not_depend_on_the_batch_if_outputs_are_normalised_or_layers_are_joined(
    library, teams, decoders, checkpoints, tmp_path, family
):
    decoder, spec = decoders(library, torch.bfloat16, "", family)
    made = [
        make_adapter(
            tmp_path / str(seed), checkpoints(family), seed=seed, rank=3 + seed, targets=FAMILIES[family][seed:]
        )
        for seed in range(2)
    ]
    of_rows = [None, *(NativeAdapter(decoder.weights.shape, read_adapter(each).parts) for each in made), None]
    check_bits_in_random_batches(decoder, spec, functools.partial(teams, library), of_rows)


@pytest.mark.parametrize(
    ("library", "kind"),
    with_few_for_tests({name: (name,) for name in ("float32", "bfloat16", "int8", "int4")}, ("bfloat16", "int8")),
    indirect=["library"],
)
def test_rows_of_several_adapters_in_one_batch_have_the_bits_that_they_have_alone(
    library, teams, decoders, adapters, kind
):
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    decoder, spec = decoders(library, dtype, kind if kind.startswith("int") else "")
    shape = decoder.weights.shape
    of_rows = [None, *(NativeAdapter(shape, read_adapter(each).parts) for each in adapters), None]
    check_bits_in_random_batches(decoder, spec, functools.partial(teams, library), of_rows)


def test_a_chunk_without_logits_and_layer_by_layer(library, teams, decoders, adapters):
    decoder, spec = decoders(library, torch.bfloat16, "")
    adapter = NativeAdapter(decoder.weights.shape, read_adapter(adapters[0]).parts)
    whole = logits_of(runner(decoder, spec, teams(library, 1)), (0, len(TOKENS), TABLES[0], adapter))[0]
    step = runner(decoder, spec, teams(library, 2))
    chunk = SequenceRows(TOKENS[:-1], 0, list(TABLES[0]), 0, adapter=adapter)
    step.forward(build_input_batch([chunk], BLOCK_SIZE), on_layer_done=lambda layer: None)
    last = logits_of(step, (len(TOKENS) - 1, 1, TABLES[0], adapter))[0]
    assert differing_rows(last, whole[-1:]) == []


def test_an_adapter_of_another_model_is_refused(portable_library, decoders):
    shape = decoders(portable_library, torch.float32, "")[0].weights.shape
    part = LowRank(np.ones((2, 96), np.float32), np.ones((96, 2), np.float32))
    with pytest.raises(ModelError, match="maps 96 to 96 features, the model's 96 to 32"):
        NativeAdapter(shape, {"model.layers.0.self_attn.k_proj": part})
    with pytest.raises(ModelError, match=r"changes model.layers.9.self_attn.o_proj, which the model does not have"):
        NativeAdapter(shape, {"model.layers.9.self_attn.o_proj": part})
    joined = LowRank(np.ones((2, 96), np.float32), np.ones((160, 2), np.float32))
    with pytest.raises(ModelError, match=r"changes model.layers.0.self_attn.qkv_proj both as a whole and in part"):
        NativeAdapter(shape, {"model.layers.0.self_attn.q_proj": part, "model.layers.0.self_attn.qkv_proj": joined})
