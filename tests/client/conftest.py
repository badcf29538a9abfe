from __future__ import annotations

import pytest

from tests.client.answering_router import AnsweringRouter, Serving
from tests.client.readers import AsyncReader, SyncReader


@pytest.fixture
def start(tmp_path):
    """start(store) returns a Serving. Routers with the same store know each other's requests."""
    running = []

    def start_router(store="store", **options):
        directory = tmp_path / store
        directory.mkdir(exist_ok=True)
        running.append(Serving(AnsweringRouter(directory, **options)))
        return running[-1]

    yield start_router
    for serving in running:
        serving.stop()


@pytest.fixture(params=[SyncReader, AsyncReader])
def reader_of(request):
    return request.param
