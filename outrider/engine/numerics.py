"""A node's batch-invariance guarantee, as a name that nodes compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.constraints import grammar

KERNELS_REVISION = 2
"""Revision of the native kernels' arithmetic. Raise it whenever the same model and tokens give other bits than before.
Nodes with different revisions can serve together, as can nodes with different instruction paths, because they exchange
data in the same format."""
LAYERS_REVISION = 4
"""Revision of the arithmetic of the native layers that replace single layers of a transformers model."""


class BatchInvariance(StrEnum):
    """How far an answer's tokens are independent of the batch and of drafts."""

    EXACT = "exact"
    """A row's logits have the same bits in every batch, so the tokens are always the same."""

    UP_TO_TIES = "exact up to ties"
    """Logits differ by float32 rounding, so tokens are the same unless two candidates differ by less than that."""

    BATCH_DEPENDENT = "batch-dependent"
    """Logits differ by bfloat16 rounding between batches, which may change about one greedy decision in fifty."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """A node's numerics, sent as a string in `ModelInfo.numerics`. Two nodes compute equal bits if their strings are
    equal and their batch invariance is EXACT.
    """

    batch_invariance: BatchInvariance
    kernels: str  # "amx", "torch bfloat16"

    def __str__(self) -> str:
        """Includes the version of the grammar code, which decides the tokens that a constraint allows."""
        return f"{self.batch_invariance} ({self.kernels}, {grammar.NUMERICS})"


def native_numerics(
    path: str,
    *,
    by_layers: bool = False,
    weights: str = "",
    batch_invariance: BatchInvariance = BatchInvariance.EXACT,
) -> Numerics:
    """Returns the numerics of native kernels, which keep the order of every sum fixed.

    Args:
        path: the instruction path.
        by_layers: whether transformers runs the model with native layers, which rounds differently from a native
            decoder.
        weights: how weights, and the rows they multiply, are rounded, such as "int8 activations"; "": they are not.
            The rounding does not depend on the batch.
        batch_invariance: not EXACT if torch computes a part that depends on the batch.
    """
    notes = [f"{path} {KERNELS_REVISION}", *[f"by layers {LAYERS_REVISION}"] * by_layers, *[weights] * bool(weights)]
    return Numerics(batch_invariance, ", ".join(notes))


def torch_batch_invariance(dtype: str) -> BatchInvariance:
    """Returns the guarantee of torch's own kernels; `dtype` is "float32" or "bfloat16"."""
    return BatchInvariance.UP_TO_TIES if dtype == "float32" else BatchInvariance.BATCH_DEPENDENT


def torch_numerics(dtype: str, device_type: str, *, num_ranks: int = 1) -> Numerics:
    """Returns the numerics of torch's own kernels; `dtype` is "float32" or "bfloat16", `device_type` "cpu" or "cuda".

    `num_ranks`: number of processes that share the model. Each sums its part of a product, so the order of sums depends
    on this number.
    """
    kernels = f"torch {dtype}" if device_type == "cpu" else f"{device_type} {dtype}"
    return Numerics(torch_batch_invariance(dtype), kernels if num_ranks == 1 else f"{kernels}, {num_ranks} ranks")


def allowed_difference(dtype: str, *, is_lossy: bool) -> float:
    """Returns the allowed difference of a probe's logits from transformers', relative to the largest logit. `is_lossy`:
    whether weights or activations are quantised.

    Rounding causes far smaller differences, and a wrong mask, position or cache far larger ones.
    """
    return 0.3 if is_lossy else {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}[dtype]
