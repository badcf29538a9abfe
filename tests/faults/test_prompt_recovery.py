"""A prefill node is lost during a long prompt. The KV that has arrived is not computed again."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.cluster.config import ClusterConfig
from outrider.errors import NotFoundError
from outrider.faults import FAULTS_VARIABLE, ONCE_VARIABLE
from tests.conftest import START_SECONDS, RunningCluster
from tests.support.waiting import wait_for

PROMPT = [(i * 17) % 250 + 20 for i in range(1500)]  # six chunks
OPTIONS = {"max_tokens": 8, "seed": 1}
LOST_SECONDS = 20.0  # shorter than every timeout except the liveness timeout
FAULTS = ("prefill.chunk:5=hold", "decode.between_frames:5=delay:1")
"""Faults: the prefill node waits before its fifth chunk, and six frames, of at least two chunks, have arrived."""


def reached(directory):
    """Waits for both faults. Returns a file with the pid of the waiting prefill node. Emptying it releases the node."""
    files = [directory / f"once.{fault.partition(':')[0]}" for fault in FAULTS]
    wait_for(lambda: all(file.exists() for file in files))
    return files[0]


@pytest.mark.parametrize(
    ("num_prefill_nodes", "number"),
    [
        (2, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_only_the_missing_tokens_are_computed(start_cluster, tmp_path, number, num_prefill_nodes):
    """Another prefill node computes them, or the decode node if there is no other prefill node."""
    environ = {FAULTS_VARIABLE: ";".join(FAULTS), ONCE_VARIABLE: str(tmp_path / "once")}
    config = ClusterConfig(port=0, prefill_nodes=num_prefill_nodes)
    with (
        start_cluster(config, "kv_cache.prefix_cache=false", environ=environ) as cluster,
        ThreadPoolExecutor(1) as executor,
    ):
        cluster.wait_serving(START_SECONDS)
        running = RunningCluster(cluster)
        running.wait_until_all_serve()
        answer = executor.submit(running.generate, PROMPT, **OPTIONS)
        waiting = reached(tmp_path)
        os.kill(int(waiting.read_text()), number)
        token_ids, summary = answer.result(LOST_SECONDS)
        assert summary.usage.num_cached_tokens >= 512, "computed by the one that was lost"
        waiting.write_text("")
        for index in range(num_prefill_nodes):
            with contextlib.suppress(NotFoundError):
                cluster.kill(f"prefill-{index}", signal.SIGCONT)
        running.wait_until_all_serve()
        running.wait_until_nothing_is_held()
        again, undisturbed = running.generate(PROMPT, **OPTIONS)
        assert token_ids == again
        assert undisturbed.usage.num_cached_tokens == 0
