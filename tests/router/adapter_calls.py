"""Calls that load and unload adapters (LoRA) in a cluster of fake nodes, and what its nodes have then."""

from __future__ import annotations

import hashlib
import os

from outrider.request import Adapter
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS
from tests.support.adapters import ScriptedAdapters

SQL, LAW = Adapter("sql", "a1" * 32), Adapter("law", "b2" * 32)
SQL_OF_D = Adapter("sql", hashlib.sha256(b"d").hexdigest())  # what ScriptedAdapters load from the directory "d"


def load(cluster, name="sql", directory="d", **call):
    request = router_pb2.LoadAdapterRequest(name=name, directory=directory)
    return cluster.stub.LoadAdapter(request, timeout=PATIENCE_SECONDS, **call)


def unload(cluster, name="sql", **call):
    return cluster.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(name=name), timeout=PATIENCE_SECONDS, **call)


def fingerprints_on(nodes, name="sql"):
    return {adapter.fingerprint for node in nodes for adapter in node.adapters.adapters if adapter.name == name}


def nodes_with(pair, adapter):
    return [node.name for node in pair.nodes if adapter in node.adapters.adapters]


async def restart(pair, node, adapters=(), *, refusal=None):
    """Restarts a node's process, which has then only these adapters. `refusal`: of loads."""
    await lose(pair, node)
    node.adapters, node.incarnation = ScriptedAdapters(*adapters), os.urandom(16)
    node.adapters.refusal = refusal
    await node.start()


async def lose(pair, node):
    """Has the router lose a node, whose process goes on."""
    link = pair.link_of(node)
    await node.stop()
    await pair.eventually(lambda: not link.is_serving)
