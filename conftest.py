"""The order that tests run in, and which of them this machine can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_FOLDERS = ("statistical", "faults", "e2e", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick folders first, so that a plain mistake shows in seconds; whole clusters last."""
    items.sort(key=_rank)  # stable: the order within a folder stays
    _skip_without_cuda([item for item in items if item.get_closest_marker("gpu")])


def _rank(item: pytest.Item) -> int:
    parts = item.path.relative_to(item.config.rootpath).parts
    folder = parts[1] if parts[0] == "tests" else ""
    return 1 + LAST_FOLDERS.index(folder) if folder in LAST_FOLDERS else 0


def _skip_without_cuda(items: Sequence[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
