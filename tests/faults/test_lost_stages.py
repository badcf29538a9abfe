"""A prefill node with two stages, a decode node with three: the answers of single processes, even if a stage dies."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from outrider.cluster.child import ChildState
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch
from tests.conftest import START_SECONDS, SUPERVISION, RunningCluster
from tests.support.cluster_nodes import wait_for_node
from tests.support.random_eagle3 import make_random_eagle3
from tests.support.tiny_model import make_tiny_model

PROMPT = [(i * 13) % 250 + 20 for i in range(150)]
REPETITIVE = {"logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}, "ignore_eos": True}
REQUESTS = [
    {"max_tokens": 60, "temperature": 0.0},
    {"max_tokens": 60, "temperature": 0.9, "seed": 7},
    {"max_tokens": 150, "temperature": 0.9, "seed": 3, **REPETITIVE},
]
KV_MEMORY = "640KiB"  # enough for 640 tokens, so that concurrent ones are preempted


@pytest.fixture(scope="module")
def staged(tiny_model, tmp_path_factory):
    head, _ = make_random_eagle3(
        tmp_path_factory.mktemp("head"), max_model_len=2048, eagle_aux_hidden_state_layer_ids=[0, 1, 3]
    )
    launch = Launch(
        overrides=(
            f"model.id={tiny_model}",
            f"model.head={head}",
            "model.num_threads=1",
            "model.max_model_len=512",
            "decode_node.draft_rows=all",
            f"router.no_node_timeout_seconds={START_SECONDS:g}",  # three processes start slowly on a busy machine
        ),
        node_overrides={
            "prefill-0": ("model.pipeline_parallel_size=2",),
            "decode-0": ("model.pipeline_parallel_size=3", f"kv_cache.memory={KV_MEMORY}"),
        },
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    with Cluster(ClusterConfig(port=0), launch, supervision=SUPERVISION) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster)
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses


def stages_of(node):
    return [
        child for child in psutil.Process(node.pid).children() if "outrider.model_hub.rank_process" in child.cmdline()
    ]


def test_answers_are_those_of_single_processes(staged, running):
    assert [len(stages_of(staged.cluster.node(name))) for name in ("prefill-0", "decode-0")] == [1, 2]
    expected = [running.generate(PROMPT, **request)[0] for request in REQUESTS]
    answers = [staged.generate(PROMPT, **request) for request in REQUESTS]
    assert [token_ids for token_ids, _ in answers] == expected
    assert answers[-1][1].metrics.speculation.num_accepted_draft_tokens > 0


def test_preempted_sequences_get_the_answers_of_single_processes(staged, running):
    prompts = [PROMPT[n:50] for n in range(8)]  # with their answers, they exceed the decode node's cache
    options = {"max_tokens": 250, "temperature": 0.9, "seed": 3, **REPETITIVE}
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(lambda _: staged.generate(PROMPT[:5], max_tokens=1), range(80)))  # long answers are unexpected
        found = [token_ids for token_ids, _ in threads.map(lambda prompt: staged.generate(prompt, **options), prompts)]
    assert found == [running.generate(prompt, **options)[0] for prompt in prompts]
    with urllib.request.urlopen(
        f"http://{staged.cluster.node('decode-0').metrics_address}/metrics", timeout=30
    ) as answer:
        lines = answer.read().decode().splitlines()
    assert sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total")) > 0


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("decode-0", 0),
        pytest.param("decode-0", 1, marks=pytest.mark.full),
        pytest.param("prefill-0", 0, marks=pytest.mark.full),
    ],
)
def test_a_stage_that_dies_ends_its_node_and_changes_no_token(staged, running, name, place):
    request = {"max_tokens": 300, "temperature": 0.9, "seed": 5, **REPETITIVE}
    expected, _ = running.generate(PROMPT, **request)
    staged.wait_until_all_serve()
    node = staged.cluster.node(name)
    pid = node.pid
    with staged.client.generate(PROMPT, **request) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                stages_of(node)[place].kill()
        assert stream.token_ids() == expected
    wait_for_node(staged.cluster, name, lambda node: node.pid != pid and node.state is ChildState.SERVING)
    assert "ended with status -9" in node.log_path.read_text()


@pytest.mark.full
def test_stages_hand_over_sliding_windows(tmp_path):
    """Each of the decode node's stages has one layer, and so only one kind of them."""
    shape = {"num_hidden_layers": 4, "sliding_window": 40}
    model = make_tiny_model(tmp_path / "model", seed=1, architecture="gemma2", overrides=shape)
    stages = {"prefill-0": ("model.pipeline_parallel_size=2",), "decode-0": ("model.pipeline_parallel_size=4",)}
    common = (f"model.id={model}", "model.dtype=bfloat16", "model.num_threads=1", "kv_cache.memory=4MiB")
    answers = []
    for number, node_overrides in enumerate((stages, {})):
        logs = tmp_path / f"logs-{number}"
        logs.mkdir()
        launch = Launch(overrides=common, node_overrides=node_overrides, log_directory=logs)
        with Cluster(ClusterConfig(port=0), launch, supervision=SUPERVISION) as cluster:
            cluster.wait_serving(START_SECONDS)
            answers.append([RunningCluster(cluster).generate(PROMPT, **request)[0] for request in REQUESTS])
    assert answers[0] == answers[1]
