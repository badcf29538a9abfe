"""prefill.proto ⇄ `outrider.prefill`."""

from __future__ import annotations

from outrider.prefill import PrefillCall, PrefillFigures
from outrider.v1 import prefill_pb2
from outrider.wire.fields import Fields
from outrider.wire.request import OPTIONS

CALL = Fields(PrefillCall, prefill_pb2.PrefillRequest, elsewhere=("traceparent",), options=OPTIONS)
FIGURES = Fields(PrefillFigures, prefill_pb2.PrefillResponse)
