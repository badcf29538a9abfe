"""Processor state that other code in the process leaves behind must not affect the kernels."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.sampler import Sampler, SampleRows
from outrider.request import SamplingParams
from tests.engine.cpu_kernels.libraries import BUILD_SECONDS
from tests.engine.cpu_kernels.operations import bits, linear, pack, paged_attention
from tests.support.waiting import wait_for


def random_rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def flushing():
    """Makes the calling thread treat subnormal numbers as zeros, as code compiled with -ffast-math does when loaded."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_subnormal_numbers_are_kept_whoever_computes_a_unit(library, teams, flushing):
    x, weight = torch.full((3, 8), 1e-30), torch.full((330, 8), 1e-10)
    torch.set_flush_denormal(False)
    expected = x.double() @ weight.double().T
    torch.set_flush_denormal(True)
    for num_threads in (1, 2, 3):
        kernels = teams(library, num_threads)
        matrix = pack(kernels, [weight])
        for _ in range(10):  # it is random which thread computes which part
            y = linear(kernels, matrix, x)
            torch.set_flush_denormal(False)
            assert torch.allclose(y.double(), expected, rtol=1e-4, atol=0.0)
            torch.set_flush_denormal(True)


def test_subnormal_logits_are_told_apart_whoever_decides_a_row(library, teams, flushing):
    torch.set_flush_denormal(False)
    logits = torch.zeros((20, 70))
    logits[:, 40], logits[:, 66] = 1e-39, 2e-39
    torch.set_flush_denormal(True)
    for num_threads in (1, 2, 3):
        known = torch.ones(70, dtype=torch.bool)
        sampler = Sampler(vocab_size=70, known_token_ids=known, kernels=teams(library, num_threads))
        state = sampler.start(SamplingParams(seed=1, max_tokens=99, temperature=0.0), sample=0, prompt_token_ids=[])
        assert sampler.sample(logits, [SampleRows(state, 0, (66,) * 19)]).token_ids == [66] * 20


def test_the_callers_own_arithmetic_is_given_back(kernels, flushing):
    linear(kernels, pack(kernels, [torch.ones((16, 8))]), torch.ones((1, 8)))
    assert float(torch.tensor(1e-30) * torch.tensor(1e-10)) == 0.0


class Products:
    """Products of several sizes, computed by two of the library's source files, so that sizes and files alternate."""

    ORDER = (
        *(("linear", 20), ("attention", 1), ("linear", 20), ("attention", 30), ("linear", 1), ("attention", 1)),
        *(("linear", 17), ("attention", 30), ("linear", 17), ("attention", 3), ("linear", 1), ("attention", 3)),
    )

    def __init__(self, kernels):
        self.kernels = kernels
        self.weight = random_rows(40, 96)
        self.matrix = pack(kernels, [self.weight])
        cache = random_rows(4, 16, 1, 32)
        self.caches = cache, cache + 1

    def linear(self, num_rows):
        return linear(self.kernels, self.matrix, random_rows(num_rows, 96))

    def attention(self, num_rows):
        batch = build_input_batch([SequenceRows([0] * num_rows, 40 - num_rows, [2, 0, 3], 1)], 16)
        query = random_rows(num_rows, 1, 32)
        return paged_attention(self.kernels, query, *self.caches, batch, AttentionOptions(0.3))

    def in_turns(self, between):
        """Computes all products of ORDER, and calls `between` before each."""
        outputs = []
        for name, num_rows in self.ORDER:
            between()
            outputs.append(getattr(self, name)(num_rows))
        return outputs

    def assert_right(self, outputs):
        """Checks that outputs of one kind and size are equal, and that those of `linear` are the right product."""
        first = {}
        for (name, num_rows), output in zip(self.ORDER, outputs, strict=True):
            assert torch.equal(bits(output), first.setdefault((name, num_rows), bits(output))), (name, num_rows)
            if name == "linear":
                expected = random_rows(num_rows, 96).double() @ self.weight.double().T
                assert torch.allclose(output.double(), expected, rtol=2.0**-8, atol=1e-4)


def test_operators_of_different_files_may_follow_each_other_and_torch_between_them(library, teams):
    """Torch's own bfloat16 products use the same instructions if the processor has them."""
    left, right = random_rows(64, 96), random_rows(96, 64)
    for num_threads, between in ((1, lambda: None), (2, lambda: torch.mm(left, right))):
        products = Products(teams(library, num_threads))
        products.assert_right(products.in_turns(between))


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
def test_simulated_tiles_that_other_code_gave_back_are_shaped_again(made_libraries, teams):
    library = made_libraries("simulated_amx")
    products = Products(teams(library, 1))
    products.assert_right(products.in_turns(library.functions.outrider_simulated_tile_release))


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS)
def test_no_thread_keeps_its_tiles_when_it_waits(made_libraries, teams):
    """The simulation of AMX counts threads with tiles."""
    library = made_libraries("simulated_amx")
    products = Products(teams(library, 3))
    products.assert_right(products.in_turns(lambda: None))
    wait_for(lambda: library.functions.outrider_simulated_threads_with_tiles() == 0)
