from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.engine.arrays import Array
from outrider.engine.sampler import Sampler
from tests.support.sampler_kinds import NUMPY, TORCH, SamplerKind, SamplerOfKind


@pytest.fixture
def make_sampler(sampler_kind: SamplerKind) -> Callable[..., Sampler]:
    """Returns a function that makes a sampler of the tested kind. By default, every id is known."""

    def make(vocab_size: int, known: npt.NDArray[np.bool_] | None = None) -> Sampler:
        mask = np.ones(vocab_size, dtype=np.bool_) if known is None else known
        return SamplerOfKind(sampler_kind, vocab_size=vocab_size, known_token_ids=mask)

    return make


@pytest.fixture(params=[TORCH.array, NUMPY.array], ids=["torch", "numpy"])
def array(request: pytest.FixtureRequest) -> Callable[[Any], Array]:
    """Returns a function that makes an array of the tested library."""
    return request.param


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
