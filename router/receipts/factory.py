"""Makes receipts' sinks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from router.config import STORE, RouterConfig
from router.receipts.base import ReceiptSink
from router.receipts.directory import DirectoryReceipts
from router.store.factory import store_address


def make_sink(
    config: RouterConfig, *, incarnation: bytes, environ: Mapping[str, str] = os.environ
) -> ReceiptSink | None:
    """What `router.receipts` says, for a router of this incarnation; None: no receipts. Raises: ConfigError."""
    match config.receipts:
        case "":
            return None
        case name if name == STORE:
            address = store_address(config.store, environ)
            from router.receipts.valkey import ValkeyReceipts

            return ValkeyReceipts(address, timeout_seconds=config.store_timeout_seconds)
        case folder:
            path = Path(folder).expanduser()
            return DirectoryReceipts(path, max_bytes=config.receipts_bytes, incarnation=incarnation)
