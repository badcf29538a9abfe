"""Every family of the table is served as docs/models.md says, or refused with the message that it gives."""

from __future__ import annotations

import functools

import pytest
import torch

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.errors import ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model
from tests.families import page
from tests.families.compared import EQUAL, NUM_TOKENS, Compared
from tests.families.families import DEFAULT_NAME, FAMILIES

SERVED = [*page.SERVED, *page.QUANTISED]
COMPARISONS = ("drafts", "hand-off", "prefix hit", "failover")
SLOW = {(DEFAULT_NAME, column) for column in (*COMPARISONS, "transformers' bfloat16")}
"""Cells of a real model for full runs: a small Llama takes the same ways, and e2e compares the real one's answers."""

needs_kernels = pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """compared(name) → Compared; the last one is kept for the next test."""
    torch.set_num_threads(1)
    make = functools.lru_cache(maxsize=1)(lambda name: Compared(FAMILIES[name], tmp_path_factory.mktemp("family")))
    yield make
    make.cache_clear()


@pytest.fixture(scope="module")
def told():
    return page.read_page()


def test_the_page_has_the_rows_and_columns_of_the_table(told):
    assert list(told) == list(FAMILIES)
    assert {name: list(told[name]) for name in SERVED} == {name: list(page.COLUMNS) for name in SERVED}


@needs_kernels
@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(name, column, marks=[pytest.mark.full] * (FAMILIES[name].is_large or (name, column) in SLOW))
        for name in SERVED
        for column in page.COLUMNS
    ],
)
def test_what_the_page_says_is_true(name, column, compared, told):
    """`make models` writes the page. It cannot make a result right that is wrong."""
    if FAMILIES[name].is_missing:
        pytest.skip("`make gemma` fetches it")
    model = compared(name)
    result = page.COLUMNS[column](model)
    if column == "kernels":
        assert result.startswith(model.family.kernels)
    elif column == "greedy" and not model.family.rounds:
        assert result == f"{NUM_TOKENS} of {NUM_TOKENS}"
    elif column in COMPARISONS:
        assert result == EQUAL
    assert page.fits(result, told[name][column]), f"{result}, but the page says {told[name][column]}: run make models"


@pytest.mark.parametrize("name", page.REFUSED)
def test_a_family_that_cannot_be_served_is_refused_by_name(name, tmp_path, told):
    family = FAMILIES[name]
    with pytest.raises(ModelError) as refused:
        load_model(ModelConfig(id=str(family.make(tmp_path))))
    assert refused.value.message.endswith(family.refusal)
    assert "ForCausalLM" in refused.value.message or "LMHeadModel" in refused.value.message
    assert told[name] == {page.REFUSAL: f"… {family.refusal}"}
