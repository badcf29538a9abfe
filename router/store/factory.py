"""Makes stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from outrider.errors import ConfigError
from router.store.address import MEMORY, ValkeyAddress
from router.store.base import AnswerStore

PASSWORD_VARIABLE = "OUTRIDER_STORE_PASSWORD"  # noqa: S105 the name of it


def make_store(
    url: str,
    *,
    owner: bytes,
    timeout_seconds: float,
    lease_seconds: float,
    environ: Mapping[str, str] = os.environ,
) -> AnswerStore | None:
    """The store that several routers share, for one of them: `owner` is its incarnation. Connects on first use.

    None for `MEMORY`: nobody shares it. A password in the environment goes before one in the URL. Raises: ConfigError.
    """
    if url == MEMORY:
        return None
    address = store_address(url, environ)
    from router.store.valkey import ValkeyAnswerStore

    return ValkeyAnswerStore(address, owner=owner, timeout_seconds=timeout_seconds, lease_seconds=lease_seconds)


def store_address(url: str, environ: Mapping[str, str] = os.environ) -> ValkeyAddress:
    """A store's, with the password in the environment. Raises: ConfigError, also without the Valkey client."""
    try:
        address = ValkeyAddress.parse(url)
    except ValueError as error:
        raise ConfigError(f"router.{error}") from error
    if find_spec("valkey") is None:
        raise ConfigError(
            f"router.store = {address} needs the Valkey client: in the source tree, run pip install '.[store]'"
        )
    password = environ.get(PASSWORD_VARIABLE)
    return replace(address, password=password) if password else address
