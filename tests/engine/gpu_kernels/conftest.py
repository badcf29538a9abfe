"""These tests run on the CPU, in triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.interpreted_triton import multiply_in_fixed_order

FOLDER = f"{Path(__file__).parent}{os.sep}"


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path).startswith(FOLDER):
            item.add_marker(pytest.mark.triton)


@pytest.fixture(autouse=True)
def _products_in_one_order(monkeypatch):
    multiply_in_fixed_order(monkeypatch)


@pytest.fixture(autouse=True)
def _interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: kernels are compiled for it, `make test-gpu` runs them")
