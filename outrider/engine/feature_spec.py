"""The description of features that nodes share, independent of what computes them. Torch-free.

Features (auxiliary hidden states) are the input of a drafter head: one vector per token, made from the target's hidden
states. At each position the target's residual stream is read after some layers; these readings are called taps. A
reduction turns the taps of a position into one vector. The vectors are stored in an additional plane of the paged KV
cache: the feature of token t lies in the slot of token t, so a block's content depends only on the tokens of that block
and those before it.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840) concatenates three taps and projects them; Medusa, MLPSpeculator, MTP
and EAGLE take the last hidden state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.kv_cache.planes import FEATURE_PLANE_PREFIX, PlaneSpec
from outrider.node import FeatureFormat


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSpec:
    """A reduction without its weights. A subclass holds them: FeatureReduction (torch), PackedReduction (native)."""

    taps: tuple[int, ...]  # after how many layers the residual stream is read: 0 … num_layers, in the head's order
    hidden_size: int  # the target's
    takes_final_norm: bool = False  # whether the tap after the last layer is read after the target's final norm
    epsilon: float = 1e-6  # added to the norms' mean square
    width: int = 0  # number of values in a feature
    fingerprint: str = ""  # SHA-256 in hexadecimal: nodes whose reductions share it can use each other's features

    def fingerprint_of(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
        """Returns the fingerprint. `tensors`: the weights by the names of FeatureReduction's fields, in their order."""
        digest = hashlib.sha256(repr((self.taps, self.hidden_size, self.takes_final_norm, self.epsilon)).encode())
        for name, values in tensors.items():
            digest.update(f"{name}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    @property
    def plane_name(self) -> str:
        """The plane's name, which identifies the reduction that made its content."""
        return plane_of(self.format("")).name

    def plane(self, dtype: str) -> PlaneSpec:
        """Returns the plane that stores the features: one layer, one head."""
        return plane_of(self.format(dtype))

    def format(self, dtype: str) -> FeatureFormat:
        """Returns the format that nodes exchange."""
        return FeatureFormat(fingerprint=self.fingerprint, width=self.width, dtype=dtype, taps=self.taps)


def plane_of(features: FeatureFormat) -> PlaneSpec:
    """Returns the plane that stores features of this format: one layer, one head."""
    name = FEATURE_PLANE_PREFIX + features.fingerprint[: 16 - len(FEATURE_PLANE_PREFIX)]
    return PlaneSpec(name, num_layers=1, num_heads=1, head_dim=features.width, dtype=features.dtype)
