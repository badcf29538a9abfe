from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster.child import ChildState, NodeProcess
from outrider.llm import llm as llm_module
from tests.client.answering_router import Serving
from tests.llm.scripted_router import ScriptedRouter


class FakeCluster:
    """The only cluster, and the arguments with which the LLM started it."""

    address = ""

    def __init__(self, config, launch):
        self.config = config
        self.launch = launch
        self.num_stops = 0
        self.is_interrupted = self.was_killed = False
        self.nodes = [
            NodeProcess(
                name="decode-0", role="decode_node", state=ChildState.SERVING, pid=1, address="", metrics_address=None,
                num_restarts=0, log_path=Path("log"), description={"max_running_sequences": 2},
            )
        ]  # fmt: skip

    def start(self):
        pass

    def wait_serving(self):
        pass

    @property
    def router_address(self):
        return self.address

    def stop(self):
        self.num_stops += 1
        if self.is_interrupted and not self.was_killed:
            raise KeyboardInterrupt

    def kill_all(self):
        self.was_killed = True


@pytest.fixture
def router():
    serving = Serving(ScriptedRouter())
    FakeCluster.address = serving.address
    yield serving.router
    serving.stop()


@pytest.fixture
def clusters(monkeypatch):
    """The clusters that LLMs have started."""
    made = []

    def make(config, launch):
        made.append(FakeCluster(config, launch))
        return made[-1]

    monkeypatch.setattr(llm_module, "Cluster", make)
    return made


@pytest.fixture
def llm(router, clusters):
    with llm_module.LLM() as llm:
        yield llm
