"""A draft node with a drafter head is killed or frozen during an answer, and the answer stays the same."""

from __future__ import annotations

import contextlib
import signal

import pytest

from outrider.cluster.config import ClusterConfig
from outrider.errors import NotFoundError
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.tiny_head import make_tiny_head

PROMPT = [(i * 13) % 250 + 20 for i in range(150)]
OPTIONS = {"max_tokens": 500, "seed": 3, "temperature": 0.9, "ignore_eos": True}
OPTIONS |= {"logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}}  # a random head need only guess one of three tokens

# tests/decode_node/test_remote_head.py loses draft nodes with heads in every run, within one process.
pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def running(start_cluster, tmp_path_factory):
    head = make_tiny_head(tmp_path_factory.mktemp("heads") / "tiny")
    with start_cluster(ClusterConfig(port=0, draft=f"head:{head}")) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield RunningCluster(cluster)


@pytest.fixture(scope="module")
def without_speculation(running):
    running.wait_until_all_serve()
    return running.generate(PROMPT, **OPTIONS, speculation=False)[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_losing_a_head_in_mid_answer_changes_no_token(running, without_speculation, number):
    running.wait_until_all_serve()
    try:
        with running.client.generate(PROMPT, **OPTIONS) as stream:
            is_lost = False
            for _ in stream:
                if not is_lost and len(stream.token_ids()) >= 200:
                    running.cluster.kill("draft-0", number)
                    is_lost = True
            assert is_lost
    finally:
        with contextlib.suppress(NotFoundError):  # the process was killed
            running.cluster.kill("draft-0", signal.SIGCONT)
    assert stream.token_ids() == without_speculation
    assert stream.summary.metrics.speculation.num_accepted_draft_tokens > 0, "the head has drafted until then"
    running.wait_until_all_serve()
    running.wait_until_nothing_is_held()
    again = running.generate(PROMPT, **OPTIONS)
    assert again[0] == without_speculation
