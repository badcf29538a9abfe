"""What a head is, for its proposer. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.kv_cache.planes import PlaneSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """What a proposer needs to know of a head."""

    form: str  # "eagle3"
    name: str  # of its folder
    fingerprint: str  # SHA-256 in hexadecimal of its configuration and weights
    num_layers: int = 0  # that keep keys and values; 0: the head keeps none
    num_kv_heads: int = 0
    head_dim: int = 0
    width: int  # of its own hidden state, which takes the place of a feature that is not there yet
    vocab_size: int  # of the target
    max_model_len: int  # tokens
    dtype: str
    max_depth: int | None = None  # tokens that it can draft after the last true feature; None: any number
    num_parallel: int = 1  # tokens decided in one forward; more than 1: after true features only, see `parallel_tokens`
    attends_both_ways: bool = False  # parallel rows attend to all of them, not only to those before

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Keys and values of the head's own layers; none where it keeps none."""
        if not self.num_layers:
            return ()
        return tuple(
            PlaneSpec(name, self.num_layers, self.num_kv_heads, self.head_dim, self.dtype) for name in ("k", "v")
        )
