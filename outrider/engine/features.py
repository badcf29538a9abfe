"""Features: what a drafter head is fed with, one vector for each token, made of the target's hidden states.

At each position the target gives its residual stream after some layers ("taps"); the reduction makes one vector of
them. It is kept in one more plane of the paged KV cache: the feature of token t lies in the slot of token t, so all in
a block depends on the tokens of that block and before it.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840) concatenates three taps and projects them; Medusa, MLPSpeculator, MTP
and EAGLE take the last hidden state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.engine.kv_cache.planes import FEATURE_PLANE_PREFIX, PlaneSpec
from outrider.node import FeatureFormat

_TENSORS = ("tap_norms", "norm", "projection", "bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureReduction:
    """How a head's feature is made of the target's hidden states. Belongs to the head, runs beside the target.

    taps [num_rows, num_taps * hidden_size] → tap norms or norm, where there are any → projection → [num_rows, width].
    """

    taps: tuple[int, ...]  # numbers of layers after which the residual stream is read: 0 … num_layers, in head's order
    hidden_size: int  # of the target
    takes_final_norm: bool = False  # the tap after the last layer is read behind the target's final norm
    epsilon: float = 1e-6  # of the norms
    tap_norms: Tensor | None = None  # [num_taps, hidden_size]: each tap is RMS-normalised by itself
    norm: Tensor | None = None  # [num_taps * hidden_size]: all of them are, as one vector
    projection: Tensor | None = None  # [width, num_taps * hidden_size]; None: a single tap as it is
    bias: Tensor | None = None  # [width]

    @property
    def width(self) -> int:
        """Of a feature."""
        return len(self.taps) * self.hidden_size if self.projection is None else self.projection.shape[0]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal: nodes whose reductions have the same one can use each other's features."""
        digest = hashlib.sha256(repr((self.taps, self.hidden_size, self.takes_final_norm, self.epsilon)).encode())
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
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

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FeatureReduction:
        """The same with tensors there. The fingerprint stays that of the checkpoint's values."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        moved = replace(
            self, **{name: tensor.to(device, dtype) for name, tensor in tensors.items() if tensor is not None}
        )
        moved.__dict__["fingerprint"] = self.fingerprint
        return moved

    def __call__(self, taps: Tensor) -> Tensor:
        """[num_rows, num_taps * hidden_size] → [num_rows, width], by torch."""
        if self.tap_norms is not None:
            split = taps.view(len(taps), len(self.taps), self.hidden_size)
            taps = rms_norm(split, self.tap_norms, self.epsilon).flatten(1)
        if self.norm is not None:
            taps = rms_norm(taps, self.norm, self.epsilon)
        if self.projection is None:
            return taps
        return torch.nn.functional.linear(taps, self.projection, self.bias)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square over the last dimension, in float32; weight broadcasts to rows → as rows."""
    values = rows.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (weight.float() * values).to(rows.dtype)
