"""Calls that load and unload adapters (LoRA) in a cluster of fake nodes."""

from __future__ import annotations

import hashlib

from outrider.request import Adapter
from outrider.v1 import router_pb2
from tests.router.conftest import PATIENCE_SECONDS

SQL, LAW = Adapter("sql", "a1" * 32), Adapter("law", "b2" * 32)
SQL_OF_D = Adapter("sql", hashlib.sha256(b"d").hexdigest())  # what ScriptedAdapters load from the directory "d"


def load(cluster, name="sql", directory="d", **call):
    request = router_pb2.LoadAdapterRequest(name=name, directory=directory)
    return cluster.stub.LoadAdapter(request, timeout=PATIENCE_SECONDS, **call)


def unload(cluster, name="sql", **call):
    return cluster.stub.UnloadAdapter(router_pb2.UnloadAdapterRequest(name=name), timeout=PATIENCE_SECONDS, **call)
