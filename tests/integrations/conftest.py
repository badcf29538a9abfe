from __future__ import annotations

from tests.support.draft_nodes import nodes

__all__ = ["nodes"]
