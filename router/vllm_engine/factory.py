"""Makes the engine service, where its stubs are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.service.open_calls import OpenCalls
from outrider.service.telemetry.logging import get_logger
from router.front import Front

if TYPE_CHECKING:
    from router.vllm_engine.servicer import VllmEngineServicer

_log = get_logger("router")


def make_vllm_engine(wanted: str, front: Front, calls: OpenCalls) -> VllmEngineServicer | None:
    """`wanted`: the setting `router.vllm_engine`. None: not served. Raises: ConfigError where it must be and cannot."""
    if wanted == "off":
        return None
    try:
        from router.vllm_engine.servicer import VllmEngineServicer
    except Exception as error:  # not installed, or not for the protobuf and grpc that are
        if wanted == "on":
            raise ConfigError(
                f"router.vllm_engine is on, and smg-grpc-proto cannot be imported ({error}); "
                "pip install 'outrider[openai]' brings it"
            ) from error
        if not isinstance(error, ImportError):
            _log.warning("the engine service is not served", error=str(error))
        return None
    return VllmEngineServicer(front, calls)
