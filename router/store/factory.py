"""Makes stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

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
    try:
        address = ValkeyAddress.parse(url)
    except ValueError as error:
        raise ConfigError(f"router.{error}") from error
    if password := environ.get(PASSWORD_VARIABLE):
        address = replace(address, password=password)
    try:
        from router.store.valkey import ValkeyAnswerStore
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "valkey":
            raise
        raise ConfigError(
            f"router.store = {address} needs the Valkey client: in the source tree, run pip install '.[store]'"
        ) from error
    return ValkeyAnswerStore(address, owner=owner, timeout_seconds=timeout_seconds, lease_seconds=lease_seconds)
