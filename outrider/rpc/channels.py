"""Makes gRPC channels and the options of servers. No other module makes them."""

from __future__ import annotations

import itertools

import grpc
import grpc.aio

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_channel_ids = itertools.count()

ChannelOptions = list[tuple[str, int | str]]


def server_options(
    *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, max_connection_age_seconds: float | None = None
) -> ChannelOptions:
    """Returns the options of a grpc.aio server.

    Clients may ping every second; with gRPC's defaults, they would be disconnected with ENHANCE_YOUR_CALM. Since each
    ping costs some microseconds, a client is still disconnected after 100 pings that each came within 20 ms of the
    previous one. The port is never shared, because with SO_REUSEPORT a second server on it would silently take half of
    the connections.

    `max_connection_age_seconds`: after this time (gRPC varies it by a tenth) a client is asked to
    reconnect; running calls continue over the old connection for as long as they take.
    """
    options: ChannelOptions = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", 20),
        ("grpc.http2.max_ping_strikes", 100),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 30_000),
    ]
    if max_connection_age_seconds is not None:
        # The grace period keeps gRPC's default, which is unlimited, so that streams are not cut.
        options.append(("grpc.max_connection_age_ms", round(max_connection_age_seconds * 1e3)))
    return options


def channel_options(
    *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, bulk: bool = False, is_replaceable: bool = False
) -> ChannelOptions:
    """Returns the options of a channel. `bulk`: the channel has its own TCP connection, so that payload never delays a
    token stream. `is_replaceable`: another server offers the same service, so the connection is dropped if pings are
    unanswered for some seconds.
    """
    options: ChannelOptions = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 2_000 if is_replaceable else 10_000),
        ("grpc.keepalive_timeout_ms", 3_000 if is_replaceable else 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Despite its name, this is also the timeout of one attempt to connect. A busy server needs a moment to answer.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if not bulk:
        # gRPC's own measuring pings block the keepalive until they time out, by default after a minute. Bulk channels
        # keep this default, because on a slow network an answer may wait that long behind payload.
        options.append(("grpc.http2.ping_timeout_ms", 3_000 if is_replaceable else 15_000))
    else:
        options += [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.max_frame_size", 1 << 20),
            # Even so, channels with equal arguments would share a connection. This number makes the arguments unequal.
            ("outrider.channel_id", next(_channel_ids)),
        ]
    return options


def open_channel(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    is_replaceable: bool = False,
) -> grpc.aio.Channel:
    """Opens a channel to "host:port" (or any gRPC target). Without credentials, it is plaintext. It connects on first
    use and never through a proxy.

    `server_name`: the name required in the other side's certificate, if it differs from the address.
    """
    options = channel_options(is_replaceable=is_replaceable)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=[*options, *_name_options(server_name)])


def open_sync_channel(
    target: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    bulk: bool = False,
    is_replaceable: bool = False,
) -> grpc.Channel:
    """Opens a channel like `open_channel`, for threads without an event loop."""
    options = channel_options(max_message_bytes=max_message_bytes, bulk=bulk, is_replaceable=is_replaceable)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=[*options, *_name_options(server_name)])


def _name_options(server_name: str) -> ChannelOptions:
    return [("grpc.ssl_target_name_override", server_name)] if server_name else []
