"""These run on the CPU, in triton's interpreter."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _interpreted():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: kernels are compiled for it, `make test-gpu` runs them")
