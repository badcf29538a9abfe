"""What nodes know of features, whoever computes them. Torch-free.

Features are what a drafter head is fed with: one vector for each token, made of the target's hidden states. At each
position the target gives its residual stream after some layers ("taps"); a reduction makes one vector of them. It is
kept in one more plane of the paged KV cache: the feature of token t lies in the slot of token t, so all in a block
depends on the tokens of that block and before it.

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
    """A reduction without its weights, which torch has (FeatureReduction) or the kernels (PackedReduction)."""

    taps: tuple[int, ...]  # numbers of layers after which the residual stream is read: 0 … num_layers, in head's order
    hidden_size: int  # of the target
    takes_final_norm: bool = False  # the tap after the last layer is read behind the target's final norm
    epsilon: float = 1e-6  # of the norms
    width: int = 0  # of a feature
    fingerprint: str = ""  # SHA-256 in hexadecimal: nodes whose reductions have the same can use each other's features

    def fingerprint_of(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
        """With these weights, by their names in FeatureReduction and in its order."""
        digest = hashlib.sha256(repr((self.taps, self.hidden_size, self.takes_final_norm, self.epsilon)).encode())
        for name, values in tensors.items():
            digest.update(f"{name}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    @property
    def plane_name(self) -> str:
        """Says which reduction made what the plane keeps."""
        return FEATURE_PLANE_PREFIX + self.fingerprint[: 16 - len(FEATURE_PLANE_PREFIX)]

    def plane(self, dtype: str) -> PlaneSpec:
        """Where features are kept: one layer, one head."""
        return PlaneSpec(self.plane_name, num_layers=1, num_heads=1, head_dim=self.width, dtype=dtype)

    def format(self, dtype: str) -> FeatureFormat:
        """As nodes tell each other."""
        return FeatureFormat(fingerprint=self.fingerprint, width=self.width, dtype=dtype, taps=self.taps)
