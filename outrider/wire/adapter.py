"""Converts the message Adapter of router.proto to and from `outrider.request`."""

from __future__ import annotations

from outrider.request import Adapter
from outrider.v1 import router_pb2
from outrider.wire.fields import Fields

ADAPTER = Fields(Adapter, router_pb2.Adapter)
