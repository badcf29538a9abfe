"""The interface between a head and its proposer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.engine.features import FeatureReduction
from outrider.heads.head_files import HeadFiles
from outrider.heads.spec import HeadSpec

if TYPE_CHECKING:
    from outrider.engine.cpu_kernels.kernels import CpuKernels
    from outrider.heads.packed_head import PackedHead

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""attend(layer, query, key, value, scaling) writes the rows' keys and values to the head's paged cache and attends
causally over it. query: [num_rows, num_heads, head_dim]; key, value: [num_rows, num_kv_heads, head_dim]. Query and
key are already rotated. Returns [num_rows, num_heads, head_dim]. With latent attention (`spec.latent_dim`), key and
value are what is stored, and the result has `latent_dim` instead of `head_dim`."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of one forward, sequence after sequence.

    The row of position p has token p + 1 and the feature of token p. The first token of a text has no row.
    """

    token_ids: Tensor  # [num_rows] int64
    features: Tensor  # [num_rows, width]: the target's feature, or the head's own hidden state of the row before
    depths: Tensor  # [num_rows] int64: 0 for a row with the target's feature, else the distance to the last such row
    positions: Tensor  # [num_rows] int64: positions of the features
    first_needed: int = 0  # rows before it need only keys and values; above 0 only in training of one-layer heads


class HeadModel(ABC):
    """A head of one form. One thread owns it. The caller turns gradients off.

    It is opened in two parts, because nodes of its target need only the first: the constructor reads the tensors of
    `reduction`, and `load` reads all other weights. Both raise ConfigError for an unsupported head and ModelError for
    damaged files.

    A head with `spec.num_parallel` > 1 drafts from parallel rows. They follow the last true row, which has a feature of
    the target, in the same forward. Their positions are the next ones and their depths 1, 2, …. The last `num_parallel`
    of all rows draft the tokens after the newest. Tokens that a look-ahead assumes have rows before the masks'. If
    `spec.attends_both_ways`, these belong to the parallel rows; if not, they get the head's own hidden states.
    Parallel rows leave nothing behind: the next true rows overwrite their keys and values.
    """

    form: str  # name of the form, and value of `speculators_model_type` in the layout of speculators
    architectures: Collection[str] = ()  # in layouts other than speculators', config.json names exactly one of these
    reduction: FeatureReduction
    suits_kernels: bool = False  # whether native kernels can compute the head, see `pack`
    spec: HeadSpec  # set by `load`
    target_ids: Tensor | None = None  # [draft_vocab_size] int64: the target's id of each logit; None: the ids are equal
    parallel_feature: Tensor | None = None  # [width]: the input of parallel rows in place of a feature

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        """Returns whether config.json, in any layout except that of speculators, describes a head of this form."""
        named = frozenset(config.get("architectures") or ())
        return len(named) == 1 and named <= frozenset(cls.architectures)

    @abstractmethod
    def __init__(self, files: HeadFiles) -> None: ...

    @abstractmethod
    def load(self, files: HeadFiles) -> None:
        """Reads the other weights and sets `spec` from `HeadFiles.spec`, which refuses tensors that were not read."""

    @abstractmethod
    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        """Returns [num_rows - first_needed, width]: the head's own hidden states of the rows from `first_needed` on."""

    @abstractmethod
    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        """Returns [n, draft_vocab_size] float32: logits of the token after each row's own.

        `hidden`: [n, width], what `forward` returned for these rows. `depths`: [n] int64.
        """

    def logits_after(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Corrects the logits of one token of a block by the tokens before it, for heads with `spec.is_chained`.

        Args:
            logits: [n, draft_vocab_size] float32, what `logits` returned for the token's rows.
            hidden: [n, num_rows, width], what `forward` returned for the block's drafting rows up to the token's own.
            previous: [n, num_rows] int64, for each of these rows the target's id of the token before the drafted one.

        Returns the logits [n, draft_vocab_size] float32, and the logits [n] float32 of the probabilities that the
        target accepts the token (None if the head does not estimate them).
        """
        raise NotImplementedError

    def pack(self, kernels: CpuKernels) -> PackedHead:
        """Packs the head for these kernels and drops its weights, so torch can no longer compute it."""
        raise NotImplementedError


def at_each_depth(compute: Callable[..., Tensor], depths: Tensor, *values: Tensor) -> Tensor:
    """Calls `compute(depth, *values)` once for the rows of each depth; returns the results in the order of rows.

    `depths`: [num_rows] int64. The first dimension of `values` and of results is the row.
    """
    found = sorted(set(depths.tolist()))
    if len(found) == 1:
        return compute(found[0], *values)
    places = [torch.nonzero(depths == depth)[:, 0] for depth in found]
    parts = [compute(depth, *(each[rows] for each in values)) for depth, rows in zip(found, places, strict=True)]
    return torch.cat(parts)[torch.cat(places).argsort()]
