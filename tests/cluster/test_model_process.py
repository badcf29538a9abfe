"""The process that downloads the model before the others start; it runs only if there is something to download."""

from __future__ import annotations

import pytest

from outrider.cluster.plan import plan_children
from outrider.model_hub.default_model import default_directory
from tests.cluster.test_heads_of_a_cluster import cluster_of


@pytest.fixture
def names_of(tmp_path, monkeypatch):
    """names_of(*arguments) → names of a cluster's processes if the model cache is empty."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))

    def names(*arguments):
        cluster = cluster_of(*arguments)
        return [spec.name for spec in plan_children(cluster.config, cluster.launch)]

    return names


def test_a_model_that_is_there_needs_no_process_of_its_own(names_of, tmp_path, tiny_model):
    assert names_of("--model", str(tiny_model)) == ["draft-0", "prefill-0", "decode-0", "router"]
    assert names_of()[0] == "model"
    default_directory(tmp_path / "cache").mkdir(parents=True)
    assert names_of()[0] == "draft-0"


@pytest.mark.parametrize("model", ["some/hub-id", "/nowhere"])
def test_one_that_is_not_is_looked_for_before_nodes_start(names_of, model):
    assert names_of("--model", model)[0] == "model"
