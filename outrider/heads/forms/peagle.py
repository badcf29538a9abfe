"""P-EAGLE: an EAGLE-3 head that drafts all its tokens in one forward.

The last row with the target's taps is followed by rows of a mask token, whose input is one learned vector in place of
taps. The i-th mask row drafts the token i positions after the one that the last row with taps drafts. All rows attend
causally.

Layouts: speculators (`speculators_model_type` peagle), and SpecForge's flat one (`PEagleDraftModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.heads.forms.eagle3 import Eagle3
from outrider.heads.head_files import HeadFiles
from outrider.heads.layouts import check_parallel

_DEFAULT_NUM_TOKENS = 8
"""Number of tokens if the configuration does not set it, as in published heads."""


class PEagle(Eagle3):
    """A P-EAGLE head."""

    form = "peagle"
    architectures = ("PEagleDraftModel",)

    def __init__(self, files: HeadFiles) -> None:
        super().__init__(files)
        self.suits_kernels = False  # native kernels do not compute parallel rows

    def load(self, files: HeadFiles) -> None:
        mask_token_id, num_parallel = files.config.get("mask_token_id"), _num_tokens(files.config)
        if mask_token_id is None:
            raise files.refusal("mask_token_id", None, "an id of the target's vocabulary")
        mask_token_id = int(mask_token_id)
        check_parallel(files, num_parallel, mask_token_id)
        taps = files.take("mask_hidden", 1, 1, len(self.reduction.taps) * self.reduction.hidden_size)
        self.parallel_feature = self.reduction.to(files.device, files.dtype)(taps[0])[0]
        super().load(files)
        self.spec = replace(
            self.spec, num_parallel=num_parallel, num_masks=num_parallel - 1, mask_token_id=mask_token_id
        )


def _num_tokens(options: Mapping[str, Any]) -> int:
    """Returns the number of tokens of the proposal method that the configuration prefers."""
    config = options.get("speculators_config") or {}
    for method in config.get("proposal_methods", ()):
        if method.get("proposal_type") == config.get("default_proposal_method"):
            return int(method["speculative_tokens"])
    return _DEFAULT_NUM_TOKENS
