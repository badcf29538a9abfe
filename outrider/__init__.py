"""Outrider serves a large language model as four gRPC services.

Importing this package loads neither torch nor gRPC. Clients start at `outrider.client`.
"""

from __future__ import annotations

__version__ = "0.1.0"
