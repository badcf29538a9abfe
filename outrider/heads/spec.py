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
    num_heads: int = 0  # of queries
    num_kv_heads: int = 0
    head_dim: int = 0
    width: int  # of its own hidden state, which takes the place of a feature that is not there yet
    vocab_size: int  # of the target
    max_model_len: int  # tokens
    dtype: str
    max_depth: int | None = None  # tokens that it can draft after the last true feature; None: any number
    num_parallel: int = 1  # tokens decided in one forward; more than 1: after true features only, see `parallel_tokens`
    num_masks: int = 0  # parallel rows of a mask token
    mask_token_id: int = 0
    attends_both_ways: bool = False  # parallel rows, of which the newest token is the first, attend to all of them

    def parallel_tokens(self, token_id: int) -> tuple[int, ...]:
        """The token ids of the parallel rows after the newest token, `token_id`; empty where there are none."""
        newest = (token_id,) if self.attends_both_ways else ()
        return (*newest, *(self.mask_token_id,) * self.num_masks)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Keys and values of the head's own layers; none where it keeps none."""
        if not self.num_layers:
            return ()
        return tuple(
            PlaneSpec(name, self.num_layers, self.num_kv_heads, self.head_dim, self.dtype) for name in ("k", "v")
        )
