"""Random requests to tiny models in bfloat16."""

from __future__ import annotations

import pytest

from outrider.cluster.config import ClusterConfig
from tests.conftest import START_SECONDS, RunningCluster
from tests.e2e.random_requests import assert_exact, bench_texts, soak
from tests.support.tiny_model import make_tiny_model


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafter", [pytest.param("ngram", marks=pytest.mark.full), "another_model"])
def test_random_requests_to_a_tiny_model(start_cluster, tmp_path_factory, drafter, is_full):
    """With random weights, few drafts are accepted and answers end at random, so steps mix all kinds of rows."""
    model = make_tiny_model(tmp_path_factory.mktemp("target"), dtype="bfloat16")
    draft = "ngram"
    if drafter == "another_model":
        draft = f"draft_model:{make_tiny_model(tmp_path_factory.mktemp('draft'), seed=1, dtype='bfloat16')}"
    settings = (
        f"model.id={model}",
        "model.num_threads=2",
    )
    with start_cluster(ClusterConfig(port=0, draft=draft), *settings) as started:
        started.wait_serving(START_SECONDS)
        cluster = RunningCluster(started)
        assert_exact(cluster)
        assert soak(cluster, 500 if is_full else 12, bench_texts()) > 0
