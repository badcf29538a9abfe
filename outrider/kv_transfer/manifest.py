"""The manifest: what the sender claims to have sent, and its comparison with what arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.kv_transfer.base import MAX_MISSING, Region
from outrider.kv_transfer.coverage import Coverage


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One frame that was sent."""

    region: Region
    checksum: int  # xxh3-64 of its payload


Manifest = tuple[ManifestEntry, ...]


def missing_regions(manifest: Manifest, arrived: Mapping[Region, int], coverage: Coverage) -> tuple[Region, ...]:
    """What keeps a transfer from being complete; empty when it is complete.

    Complete means: every token of every layer of every plane has arrived, and the frames
    that arrived are exactly those of the manifest, with equal checksums. At most
    `MAX_MISSING` regions: gaps first, then frames that one side has and the other has not,
    or has differently.
    """
    claimed = {entry.region: entry.checksum for entry in manifest}
    differing = [region for region in {**claimed, **arrived} if claimed.get(region) != arrived.get(region)]
    return tuple(dict.fromkeys((*coverage.missing(), *differing)))[:MAX_MISSING]
