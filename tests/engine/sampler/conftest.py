from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler import Sampler


@pytest.fixture
def make_sampler(sampler_kernels: CpuKernels | None) -> Callable[..., Sampler]:
    """Builds a sampler of each kind; every id is known unless said otherwise."""

    def make(vocab_size: int, known: npt.NDArray[np.bool_] | None = None) -> Sampler:
        mask = torch.from_numpy(np.ones(vocab_size, dtype=np.bool_) if known is None else known)
        return Sampler(vocab_size=vocab_size, known_token_ids=mask, kernels=sampler_kernels)

    return make


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
