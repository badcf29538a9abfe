"""A prefill node with two ranks that divide experts and sequences, a decode node with three, and the loss of a rank."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.cluster.child import ChildState
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch
from outrider.engine.cpu_kernels.paths import choose_kernels
from tests.conftest import START_SECONDS, SUPERVISION, RunningCluster
from tests.faults.test_lost_stages import stages_of
from tests.support.cluster_nodes import wait_for_node
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built"),
]

PROMPT = [(i * 13) % 250 + 20 for i in range(100)]
PROMPTS = [*[PROMPT[n:50] for n in range(8)], PROMPT, PROMPT]
REPETITIVE = {"logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}, "ignore_eos": True}
OPTIONS = {"max_tokens": 250, "temperature": 0.9, "seed": 3, **REPETITIVE}
RANKS = {
    "prefill-0": ("model.expert_parallel_size=2",),
    "decode-0": ("model.expert_parallel_size=3", "model.num_redundant_experts=3", "kv_cache.memory=720KiB"),
}


def start(model, logs, node_overrides):
    logs.mkdir()
    common = (
        *(f"model.id={model}", "model.num_threads=1", "model.max_model_len=512", "decode_node.draft_rows=all"),
        f"router.no_node_timeout_seconds={START_SECONDS:g}",  # several processes start slowly on a busy machine
    )
    launch = Launch(overrides=common, node_overrides=node_overrides, log_directory=logs)
    return Cluster(ClusterConfig(port=0), launch, supervision=SUPERVISION)


def answers(running):
    """Returns the answers to all prompts, which are computed at the same time."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        list(threads.map(lambda _: running.generate(PROMPT[:5], max_tokens=1), range(80)))
        return [ids for ids, _ in threads.map(lambda prompt: running.generate(prompt, **OPTIONS), PROMPTS)]


def figures(node):
    with urllib.request.urlopen(f"http://{node.metrics_address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def of(found, name):
    return [number for key, number in found.items() if key.startswith(name)]


def test_answers_are_those_of_single_processes_even_if_a_rank_dies(tmp_path):
    model = make_tiny_model(tmp_path / "model", seed=1, architecture="mixtral", dtype="bfloat16")
    with start(model, tmp_path / "single", {}) as cluster:
        cluster.wait_serving(START_SECONDS)
        expected = answers(RunningCluster(cluster))
    with start(model, tmp_path / "ranks", RANKS) as cluster:
        cluster.wait_serving(START_SECONDS)
        running, node = RunningCluster(cluster), cluster.node("decode-0")
        assert [len(stages_of(cluster.node(name))) for name in RANKS] == [1, 2]
        assert answers(running) == expected
        found = figures(node)
        assert sum(of(found, "vllm:num_preemptions_total")) > 0
        assert len(of(found, "outrider:rank_rows_total")) == 3
        assert min(of(found, "outrider:rank_rows_total")) > 0
        assert of(found, "outrider:expert_balance")[0] >= 1.0
        pid = node.pid
        with running.client.generate(PROMPT, **OPTIONS) as stream:
            for number, _ in enumerate(stream):
                if number == 3:
                    stages_of(node)[1].kill()
            assert stream.token_ids() == expected[-1]
        wait_for_node(cluster, "decode-0", lambda node: node.pid != pid and node.state is ChildState.SERVING)
        assert "ended with status -9" in node.log_path.read_text()
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses
