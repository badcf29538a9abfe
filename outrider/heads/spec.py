"""The facts about a head that its proposer needs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.kv_cache.planes import PlaneSpec, stored_vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The facts about a head that its proposer needs."""

    form: str  # e.g. "eagle3"
    name: str  # the name of its folder
    fingerprint: str  # hexadecimal SHA-256 of its configuration and weights
    num_layers: int = 0  # number of layers that keep keys and values
    num_heads: int = 0  # query heads
    num_kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = 0  # above 0: latent attention, see `stored_vectors`
    width: int  # size of features and of the head's own hidden states, which replace features for later draft tokens
    vocab_size: int  # of the target
    max_model_len: int  # tokens
    dtype: str
    max_depth: int | None = None  # maximum number of tokens drafted after the target's last feature; None: unlimited
    num_parallel: int = 1  # number of tokens drafted by one forward; above 1, each forward needs the target's features
    num_masks: int = 0  # number of parallel rows (see HeadModel) with the mask token
    mask_token_id: int = 0
    is_chained: bool = False  # whether a block's logits depend on its tokens before, see HeadModel.logits_after
    # Whether parallel rows attend to each other, and begin with the newest token and with those assumed after it, as
    # the head has no states of its own to feed.
    attends_both_ways: bool = False

    def parallel_tokens(self, token_id: int, *assumed: int) -> tuple[int, ...]:
        """Returns the token ids of the parallel rows; empty if there are none.

        `token_id`: the newest token's. `assumed`: the tokens that a path assumes after it.
        """
        newest = (token_id, *assumed) if self.attends_both_ways else ()
        return (*newest, *(self.mask_token_id,) * self.num_masks)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Planes of the head's own keys and values; empty if it keeps none."""
        if not self.num_layers:
            return ()
        return tuple(
            PlaneSpec(name, self.num_layers, self.num_kv_heads, width, self.dtype)
            for name, width in stored_vectors(self.head_dim, self.latent_dim)
        )
