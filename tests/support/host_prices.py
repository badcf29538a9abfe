"""Prices of copies for tests: they do not depend on the machine."""

from __future__ import annotations

from outrider.engine.kv_cache.copy_price import CopyPrice


class FixedPrice(CopyPrice):
    """A price whose answers a test sets. Measurements do not change them."""

    load_pays: bool = True
    save_pays: bool = True
    load_seconds: float = 1e-9
    step_seconds: float = 1e9

    def __init__(self, *, load_pays: bool = True, save_pays: bool = True) -> None:
        super().__init__(block_size=1, num_groups=4, max_rows=1)
        self.load_pays, self.save_pays = load_pays, save_pays

    def copy_seconds(self, group: int, *, is_load: bool) -> float:
        return self.load_seconds
