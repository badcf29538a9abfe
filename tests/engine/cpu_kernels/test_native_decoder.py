"""Whole decoders in one native call: logits are those of transformers, with the same bits in any schedule."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.decoder import NativeDecoder, NativeStep
from outrider.engine.features import FeatureReduction
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.tensor_planes import tensor_of
from outrider.errors import InternalError
from outrider.model_hub.support import describe_decoder
from outrider.model_hub.window import resolve_window
from tests.engine.cpu_kernels.families import FAMILIES as ARCHITECTURES
from tests.engine.cpu_kernels.families import SHAPE
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS, with_few_for_tests
from tests.engine.cpu_kernels.operations import differing_rows
from tests.support.packed_decoder import pack_decoder
from tests.support.tiny_model import make_tiny_model

BLOCK_SIZE = 16
NUM_BLOCKS = 64
VOCAB_SIZE = 331
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    made = {}

    def directory(architecture):
        if architecture not in made:
            overrides = {name: value for name, value in (SHAPE | ARCHITECTURES[architecture]).items() if value}
            made[architecture] = make_tiny_model(
                tmp_path_factory.mktemp(architecture),
                architecture=architecture,
                vocab_size=VOCAB_SIZE,
                overrides=overrides,
            )
        return made[architecture]

    return directory


@pytest.fixture(scope="session")
def rounded_checkpoints(checkpoints, tmp_path_factory):
    """Checkpoints with weights rounded to bfloat16, stored in float32."""

    @functools.cache
    def directory(architecture):
        rounded = load(checkpoints(architecture), torch.bfloat16, attention="eager")
        path = tmp_path_factory.mktemp(f"rounded-{architecture}")
        rounded.float().save_pretrained(path)
        return path

    return directory


@pytest.fixture(scope="session")
def decoders(checkpoints, teams):
    """decoders(library, architecture, kind) → NativeDecoder, each packed once."""
    made = {}
    loaded = functools.cache(load)

    def decoder(library, architecture, kind):
        key = library.file, architecture, kind
        if key not in made:
            model = loaded(checkpoints(architecture), KINDS[kind])
            dtype = str(KINDS[kind]).removeprefix("torch.")
            spec, _ = describe_decoder(model, dtype=dtype, window=resolve_window(model.config))
            weights = pack_decoder(teams(library, 1), model, spec, quantise="int8" * (kind == "int8"))
            made[key] = NativeDecoder(teams(library, 1), weights), spec
        return made[key]

    return decoder


def load(directory, dtype, attention=ATTENTION_NAME):
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(requires_grad=False)


@dataclass
class Sequence:
    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)


class Engine:
    """Runs rows of several sequences on one cache, and manages the cache's blocks."""

    def __init__(self, decoder, spec, kernels, prompts, seed=0, features=None):
        self.random = random.Random(seed)
        planes = spec.planes if features is None else (*spec.planes, features.plane(spec.dtype))
        groups = spec.layer_groups
        self.cache = PagedKVCache(
            planes, layer_groups=groups, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kernels=kernels
        )
        decoder.kernels = kernels
        self.step = NativeStep(decoder, self.cache, features)
        self.sequences = [Sequence(prompt) for prompt in prompts]
        self.references = [0] * NUM_BLOCKS
        self.spoil(range(NUM_BLOCKS))

    def spoil(self, blocks):
        for block in blocks:
            for panels in (*self.cache.keys, *self.cache.values):
                panels[block * BLOCK_SIZE // 16 : (block + 1) * BLOCK_SIZE // 16] = 0xFF  # NaN in any type

    def run(self, plan, *, on_layer_done=None, wants_logits=True, num_left_out=()):
        """Returns the logits of the rows, without those of drafts. `plan`: (sequence, rows, ids of wrong drafts).

        `num_left_out`: by sequence, the number of leading rows whose logits are not computed; by default none.
        """
        rows = []
        num_left_out = num_left_out or [0] * len(plan)
        for (index, num_rows, drafts), left_out in zip(plan, num_left_out, strict=True):
            sequence = self.sequences[index]
            first = sequence.num_computed
            self.reserve(sequence, first + num_rows + len(drafts))
            token_ids = [*sequence.token_ids[first : first + num_rows], *drafts]
            num_logits = (len(token_ids) - left_out) * wants_logits
            rows.append(SequenceRows(token_ids, first, list(sequence.block_ids), num_logits))
            sequence.num_computed += num_rows
        logits = torch.from_numpy(self.step.forward(build_input_batch(rows, BLOCK_SIZE), on_layer_done=on_layer_done))
        if not wants_logits:
            assert logits.shape == (0, VOCAB_SIZE)
            return []
        parts = logits.split([part.num_logits for part in rows])
        return [part[: len(part) - len(drafts)] for part, (_, _, drafts) in zip(parts, plan, strict=True)]

    def reserve(self, sequence, num_tokens):
        while len(sequence.block_ids) * BLOCK_SIZE < num_tokens:
            block = self.random.choice([block for block, count in enumerate(self.references) if count == 0])
            self.references[block] = 1
            sequence.block_ids.append(block)

    def preempt(self, sequence):
        """Drops a sequence's KV, except blocks that another sequence shares."""
        for block in sequence.block_ids:
            self.references[block] -= 1
        self.spoil(block for block in sequence.block_ids if self.references[block] == 0)
        sequence.block_ids, sequence.num_computed = [], 0

    def share_prefix(self, sequence, other):
        """Does what a prefix cache does: shares whole blocks of equal tokens instead of computing them."""
        equal = next(
            (i for i, pair in enumerate(zip(sequence.token_ids, other.token_ids, strict=False)) if pair[0] != pair[1]),
            min(len(sequence.token_ids), len(other.token_ids)),
        )
        # One token must be left to compute.
        num_blocks = min(equal, other.num_computed, len(sequence.token_ids) - 1) // BLOCK_SIZE
        sequence.block_ids = other.block_ids[:num_blocks]
        sequence.num_computed = num_blocks * BLOCK_SIZE
        for block in sequence.block_ids:
            self.references[block] += 1


def random_ids(count, seed):
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


LONG = random_ids(280, 1)  # longer than one span of keys in the attention kernel
PROMPTS = [LONG, LONG[:100] + random_ids(50, 2), random_ids(70, 3)]


@functools.cache
def prompt_alone(decoder, spec, kernels, index):
    """Returns the logits of every token of one of PROMPTS, computed one row at a time, by one thread."""
    engine = Engine(decoder, spec, kernels, PROMPTS)
    return torch.cat([engine.run([(index, 1, [])])[0] for _ in PROMPTS[index]])


def logits_alone(decoder, spec, kernels):
    """Returns the logits of all PROMPTS."""
    return [prompt_alone(decoder, spec, kernels, index) for index in range(len(PROMPTS))]


def rows_that_differ(alone, decoder, spec, kernels, seed, *, leaves_out=False):
    """Returns each (sequence, position) whose logits have other bits in a random schedule than when computed alone.

    The schedule has chunks of any size, single rows, wrong drafts, mixed batches, prefix hits and preemption.
    `leaves_out`: whether logits of rows at the beginning of chunks are not computed.
    """
    engine = Engine(decoder, spec, kernels, PROMPTS, seed)
    choose, differing, num_compared, num_left_out = engine.random, [], 0, 0
    num_preemptions = 2
    while unfinished := [i for i, s in enumerate(engine.sequences) if s.num_computed < len(s.token_ids)]:
        if num_preemptions and choose.random() < 0.15:
            engine.preempt(choose.choice(engine.sequences))
            num_preemptions -= 1
            continue
        chosen = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        plan = []
        for index in chosen:
            sequence = engine.sequences[index]
            if sequence.num_computed == 0 and choose.random() < 0.7:
                engine.share_prefix(sequence, engine.sequences[1 - index] if index < 2 else sequence)
            left = len(sequence.token_ids) - sequence.num_computed
            num_rows = min(left, choose.choice([1, 1, 5, choose.randint(1, 40), choose.randint(1, 300)]))
            drafts = [choose.randint(3, 319) for _ in range(choose.choice([0, 0, 4]))]
            plan.append((index, num_rows, drafts))
        left_out = [choose.randint(0, num_rows) if leaves_out else 0 for _, num_rows, _ in plan]
        all_logits = engine.run(plan, num_left_out=left_out)
        for (index, num_rows, _), num_out, logits in zip(plan, left_out, all_logits, strict=True):
            first = engine.sequences[index].num_computed - num_rows + num_out
            expected = alone[index][first : first + num_rows - num_out]
            differing += [(index, first + row) for row in differing_rows(logits, expected)]
            num_compared += len(logits)
            num_left_out += num_out
    assert num_compared + num_left_out >= len(LONG) + len(PROMPTS[2])
    assert num_compared > 50
    assert (num_left_out > 50) == leaves_out
    return differing


@pytest.mark.parametrize(
    ("library", "architecture", "kind"),
    with_few_for_tests(
        {f"{architecture}-{kind}": (architecture, kind) for architecture in ARCHITECTURES for kind in KINDS},
        few=("mistral-bfloat16",),
    ),
    indirect=["library"],
)
def test_a_tokens_logits_have_the_same_bits_in_any_schedule(library, teams, decoders, architecture, kind):
    decoder, spec = decoders(library, architecture, kind)
    alone = logits_alone(decoder, spec, teams(library, 1))
    assert not torch.cat(alone).isnan().any()
    for num_threads in (1, 2, 3):
        assert rows_that_differ(alone, decoder, spec, teams(library, num_threads), seed=num_threads) == []
    assert rows_that_differ(alone, decoder, spec, teams(library, 2), seed=4, leaves_out=True) == []


def test_a_cache_that_was_made_for_torch_is_refused(portable_library, decoders):
    decoder, spec = decoders(portable_library, "llama", "float32")
    with pytest.raises(InternalError, match="made for its kernels"):
        NativeStep(
            decoder, PagedKVCache(spec.planes, layer_groups=spec.layer_groups, num_blocks=1, block_size=BLOCK_SIZE)
        )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_prompt_in_one_chunk_and_layer_by_layer(library, teams, decoders, architecture):
    decoder, spec = decoders(library, architecture, "bfloat16")
    alone = prompt_alone(decoder, spec, teams(library, 1), 0)
    whole = Engine(decoder, spec, teams(library, 3), PROMPTS).run([(0, len(LONG), [])])[0]
    assert differing_rows(whole, alone) == []
    layers = []
    engine = Engine(decoder, spec, teams(library, 2), PROMPTS)
    by_layers = engine.run([(0, len(LONG), [])], on_layer_done=layers.append)[0]
    assert differing_rows(by_layers, alone) == []
    assert layers == [0, 1]


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_without_logits_leaves_the_same_keys_and_values(library, teams, decoders, kind, architecture):
    """The last layer of such a chunk computes only keys and values."""
    decoder, spec = decoders(library, architecture, kind)
    engines = [Engine(decoder, spec, teams(library, 2), PROMPTS) for _ in range(2)]
    for engine, wants_logits in zip(engines, (True, False), strict=True):
        engine.run([(0, 200, []), (2, 70, [])], wants_logits=wants_logits)
        engine.run([(0, 79, [])], wants_logits=wants_logits, on_layer_done=lambda layer: None)
    for written, expected in zip(*((engine.cache.keys, engine.cache.values) for engine in engines), strict=True):
        assert np.array_equal(written, expected)
    with_logits, without = (engine.run([(0, 1, [])])[0] for engine in engines)
    assert differing_rows(without, with_logits) == []


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("kind", KINDS)
def test_features_have_the_same_bits_alone_and_in_company(library, teams, decoders, kind, architecture):
    decoder, spec = decoders(library, architecture, kind)
    weight = torch.randn(51, 3 * SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    reduction = FeatureReduction(taps=(0, 2, 1), hidden_size=SHAPE["hidden_size"], norm=weight[0], projection=weight)
    alone, together = (
        Engine(decoder, spec, teams(library, num_threads), PROMPTS, features=reduction) for num_threads in (1, 3)
    )
    for _ in PROMPTS[2]:
        logits = alone.run([(2, 1, [])])[0]
    in_company = together.run([(0, 90, []), (2, 69, []), (1, 7, [])])[1]
    in_company = torch.cat([in_company, together.run([(0, 1, []), (2, 1, [4, 5])])[1]])
    assert differing_rows(in_company[-1:], logits) == []
    planes = [tensor_of(engine.cache.layers(reduction.plane_name)[0]) for engine in (alone, together)]
    tables = [engine.sequences[2].block_ids for engine in (alone, together)]
    found, expected = (plane[table].flatten(0, 2)[:70] for plane, table in zip(planes, tables, strict=True))
    assert found.any(dim=1).all()
    assert differing_rows(found, expected) == []


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma3_text", "olmo3"])
@pytest.mark.parametrize("num_known", [1, 20])
def test_drafts_of_a_tree_have_the_logits_and_leave_the_keys_and_values_of_plain_decode(
    library, teams, decoders, architecture, num_known
):
    """The tree has the correct tokens and wrong ones. Then the correct ones are moved to consecutive slots."""
    decoder, spec = decoders(library, architecture, "bfloat16")
    alone = prompt_alone(decoder, spec, teams(library, 1), 0)
    plain, engine = (Engine(decoder, spec, teams(library, num_threads), [LONG]) for num_threads in (1, 2))
    start = 257 - num_known  # the last known token is the first one of a span and of a block
    plain.run([(0, 264, [])])
    engine.run([(0, start, [])])
    sequence = engine.sequences[0]
    # true, wrong, true, wrong after the wrong one, true, true, wrong
    parents, true_rows = (-1, -1, 0, 1, 2, 4, 4), (0, 2, 4, 5)
    drafts = [LONG[257], 5, LONG[258], 6, LONG[259], LONG[260], 7]
    engine.reserve(sequence, 257 + len(drafts))
    rows = SequenceRows([*LONG[start:257], *drafts], start, sequence.block_ids, 1 + len(drafts), parents)
    batch = build_input_batch([rows], BLOCK_SIZE)
    logits = torch.from_numpy(engine.step.forward(batch))
    assert differing_rows(logits[[0, *(1 + row for row in true_rows)]], alone[256:261]) == []
    slots = batch.arrays.slot_mapping[num_known:].tolist()
    engine.cache.move_slots([(slots[row], slots[place]) for place, row in enumerate(true_rows) if row != place])
    assert kv_of(engine, 261) == kv_of(plain, 261)


def kv_of(engine, num_tokens):
    """Returns the keys and values of the first sequence, as bytes."""
    slots = np.array(engine.sequences[0].block_ids)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)
    taken = slots.flatten()[:num_tokens]
    return [engine.cache.read(plane.name, range(plane.num_layers), taken).tobytes() for plane in engine.cache.planes]


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_breaks_the_rule_is_caught(rule_breaking_library, teams, decoders, kind):
    """Negative control of the test above."""
    decoder, spec = decoders(rule_breaking_library, "llama", kind)
    kernels = teams(rule_breaking_library, 1)
    assert rows_that_differ(logits_alone(decoder, spec, kernels), decoder, spec, kernels, seed=0)


# ---- correct values, not only equal bits


@functools.cache
def logits_of_transformers(directory, dtype):
    """Returns the logits of every token of LONG from the unchanged model: [280, vocab_size] float64."""
    model = load(directory, dtype, attention="eager")
    with torch.inference_mode():
        return model(torch.tensor([LONG])).logits[0].double()


def native_logits(decoder, spec, kernels):
    return Engine(decoder, spec, kernels, PROMPTS).run([(0, len(LONG), [])])[0].double()


def error_of(logits, expected):
    return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "allowed"), [("float32", 1e-5), ("int8", 0.1)])
def test_logits_are_those_of_transformers(library, teams, decoders, checkpoints, architecture, kind, allowed):
    """They are equal up to the rounding of float32. int8 weights are lossy by a few hundredths."""
    logits = native_logits(*decoders(library, architecture, kind), teams(library, 1))
    assert error_of(logits, logits_of_transformers(checkpoints(architecture), torch.float32)) < allowed


@pytest.mark.parametrize(
    ("library", "head_dim"),
    with_few_for_tests({str(head_dim): (head_dim,) for head_dim in (32, 64, 80, 128)}, few=("80",)),
    indirect=["library"],
)
def test_float32_logits_with_heads_of_any_size(library, teams, head_dim, tmp_path):
    shape = {**SHAPE, "head_dim": head_dim, "num_attention_heads": 4}
    make_tiny_model(tmp_path, architecture="qwen3", vocab_size=VOCAB_SIZE, overrides=shape)
    model = load(tmp_path, torch.float32)
    spec, _ = describe_decoder(model, dtype="float32", window=resolve_window(model.config))
    decoder = NativeDecoder(teams(library, 1), pack_decoder(teams(library, 1), model, spec))
    logits = native_logits(decoder, spec, teams(library, 1))
    assert error_of(logits, logits_of_transformers(tmp_path, torch.float32)) < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_logits_are_nearer_to_float32_than_those_of_transformers(
    library, teams, decoders, checkpoints, rounded_checkpoints, architecture
):
    expected = logits_of_transformers(rounded_checkpoints(architecture), torch.float32)
    theirs = error_of(logits_of_transformers(checkpoints(architecture), torch.bfloat16), expected)
    logits = native_logits(*decoders(library, architecture, "bfloat16"), teams(library, 1))
    assert error_of(logits, expected) <= theirs
