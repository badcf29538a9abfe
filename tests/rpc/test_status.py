from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider import errors
from outrider.rpc.status import DETAILS_KEY, from_rpc_error, status_code, to_status
from outrider.service.rpc_errors import rpc_errors
from outrider.v1 import draft_pb2, draft_pb2_grpc


class SeenError(grpc.RpcError):
    """An error status as a client receives it."""

    def __init__(self, code: grpc.StatusCode, message: str, trailing=()) -> None:
        super().__init__(message)
        self._parts = (code, message, trailing)

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


def over_the_wire(error: BaseException) -> SeenError:
    status = to_status(error)
    return SeenError(status_code(error), status.message, ((DETAILS_KEY, status.SerializeToString()),))


ERRORS = [
    errors.InvalidRequestError("top_p must be in (0, 1], not 2", field="sampling.top_p"),
    errors.NotFoundError("no model named x", reason="MODEL_NOT_FOUND"),
    errors.AlreadyRunningError("request_id r1 is in use"),
    errors.CapacityError("256 requests wait", retry_after_seconds=2.5),
    errors.NotSupportedError("not yet", field="sampling.regex"),
    errors.MismatchError("fingerprint a against b"),
    errors.AbortedError("taken over"),
    errors.PeerLostError("decode@1.2.3.4:5 was lost", node="decode@1.2.3.4:5", retry_after_seconds=0.5),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_sent(error):
    arrived = from_rpc_error(over_the_wire(error))
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error) | {"reason": error.reason}
    assert str(arrived) == str(error)


def test_details_carry_what_the_contract_promises():
    status = to_status(errors.CapacityError("full", retry_after_seconds=0.25))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("OVERLOADED", "outrider")
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.nanos == 250_000_000
    bad_request = error_details_pb2.BadRequest()
    assert to_status(ERRORS[0]).details[1].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "sampling.top_p"


@pytest.mark.parametrize(
    "error", [RuntimeError("secret path /etc"), errors.InternalError("secret"), errors.ConfigError("secret")]
)
def test_internal_errors_say_nothing_of_our_insides(error):
    status = to_status(error)
    assert status_code(error) is grpc.StatusCode.INTERNAL
    assert "secret" not in str(status)
    assert isinstance(from_rpc_error(over_the_wire(error)), errors.InternalError)


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerLostError, "UNREACHABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.AbortedError, "DEADLINE_EXCEEDED"),
        (grpc.StatusCode.CANCELLED, errors.AbortedError, "CANCELLED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError, "OVERLOADED"),
        (grpc.StatusCode.DATA_LOSS, errors.InternalError, "INTERNAL"),
    ],
)
def test_statuses_that_grpc_makes_have_their_errors_too(code, kind, reason):
    arrived = from_rpc_error(SeenError(code, "gone"), target="127.0.0.1:1")
    assert type(arrived) is kind
    assert arrived.reason == reason


def test_details_from_a_stranger_are_survived():
    garbage = SeenError(grpc.StatusCode.NOT_FOUND, "no", ((DETAILS_KEY, b"\xff\xff\xff"),))
    assert from_rpc_error(garbage).message == "no"
    status = status_pb2.Status(code=5)
    status.details.add(type_url="type.googleapis.com/who.Knows", value=b"\x01")
    strange = SeenError(grpc.StatusCode.NOT_FOUND, "no", ((DETAILS_KEY, status.SerializeToString()),))
    assert isinstance(from_rpc_error(strange), errors.NotFoundError)


async def test_bytes_that_do_not_parse_are_the_callers_mistake():
    class Servicer(draft_pb2_grpc.DraftServiceServicer):
        async def Draft(self, request_iterator, context):
            async with rpc_errors(context):
                async for _ in request_iterator:
                    yield draft_pb2.DraftProposals()

    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/outrider.v1.DraftService/Draft")(iter([b"\xff" * 64]), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
    finally:
        await server.stop(None)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "a message does not parse"
