"""The manifest: what the sender claims to have sent, and its comparison with what arrived."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.kv_transfer.base import MAX_MISSING, Region
from outrider.kv_transfer.coverage import Coverage

Manifest = Mapping[Region, int]
"""Of each frame that was sent: the xxh3-64 of its payload."""


def missing_regions(manifest: Manifest, arrived: Manifest, coverage: Coverage) -> tuple[Region, ...]:
    """What keeps a transfer from being complete; empty when it is complete.

    Complete means: every token of every layer of every plane has arrived, and the frames
    that arrived are exactly those of the manifest, with equal checksums. At most
    `MAX_MISSING` regions: gaps first, then frames that one side has and the other has not,
    or has differently.
    """
    differing = [region for region in {**manifest, **arrived} if manifest.get(region) != arrived.get(region)]
    return tuple(dict.fromkeys((*coverage.missing(), *differing)))[:MAX_MISSING]
