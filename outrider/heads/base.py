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
"""attend(layer, query, key, value, scaling): writes the rows' keys and values to the head's paged cache and attends
causally over it. query [num_rows, num_heads, head_dim], key and value [num_rows, num_kv_heads, head_dim], rotated
→ [num_rows, num_heads, head_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """One forward's rows, of all sequences end to end.

    The row of position p pairs token p + 1 with the feature of token p; the first token of a text has none.
    """

    token_ids: Tensor  # [num_rows] int64
    features: Tensor  # [num_rows, width]: the target's, or the head's own hidden state of the row before
    depths: Tensor  # [num_rows] int64: 0 where the feature is true, else how many rows after the last true one
    positions: Tensor  # [num_rows] int64: of the feature
    first_needed: int = 0  # in training: rows before it give keys and values, and no state; of heads of one layer


class HeadModel(ABC):
    """A head of one form. One owner thread. The caller turns gradients off.

    Made in two parts, as its target's nodes need no more than the first: its class is given the files and reads what
    `reduction` needs; `load` reads all other weights. Both raise ConfigError for what is not supported, ModelError for
    damaged files.

    A head with `spec.num_parallel` > 1 decides after parallel rows, which follow the last true one in the same forward,
    with the next positions and depths 1, 2, …; the last `num_parallel` rows of both give the tokens after the newest.
    Nothing of parallel rows stays: the next true rows take the places of their keys and values.
    """

    form: str  # as `speculators_model_type` in the layout of speculators
    architectures: Collection[str] = ()  # in any other layout: config.json names one of these, and no other
    reduction: FeatureReduction
    suits_kernels: bool = False  # native kernels can compute it: `pack`
    spec: HeadSpec  # from `load` on
    target_ids: Tensor | None = None  # [draft_vocab_size] int64: the target's id of each logit; None: they are the same
    parallel_feature: Tensor | None = None  # [width]: what parallel rows are fed with in place of a feature

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        """By config.json, in any other layout than that of speculators."""
        named = frozenset(config.get("architectures") or ())
        return len(named) == 1 and named <= frozenset(cls.architectures)

    @abstractmethod
    def __init__(self, files: HeadFiles) -> None: ...

    @abstractmethod
    def load(self, files: HeadFiles) -> None:
        """The same files. Ends with `HeadFiles.spec`, which refuses tensors that were not read."""

    @abstractmethod
    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        """The head's own hidden state after each row from `first_needed` on: [num_rows - first_needed, width]."""

    @abstractmethod
    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        """[n, width], [n] int64 → [n, draft_vocab_size] float32: of the token after the one that each row was fed."""

    def pack(self, kernels: CpuKernels) -> PackedHead:
        """For the kernels. It takes the weights along: torch cannot compute this head any more."""
        raise NotImplementedError


def at_each_depth(compute: Callable[..., Tensor], depths: Tensor, *values: Tensor) -> Tensor:
    """`compute(depth, *values)` of the rows at each depth [num_rows] → what it gives, in the order of rows."""
    found = sorted(set(depths.tolist()))
    if len(found) == 1:
        return compute(found[0], *values)
    places = [torch.nonzero(depths == depth)[:, 0] for depth in found]
    parts = [compute(depth, *(each[rows] for each in values)) for depth, rows in zip(found, places, strict=True)]
    return torch.cat(parts)[torch.cat(places).argsort()]
