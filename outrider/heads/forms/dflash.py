"""DFlash: drafts a block of tokens in one forward, whose rows attend to each other.

The target's features are the context: every layer computes keys and values from them directly. The parallel rows are
the newest token and one mask token for each drafted token; they attend to the context and to each other. So rows of
depth 0, which have the target's features, give keys and values but no useful hidden state.

Layouts: speculators (`speculators_model_type` dflash), and z-lab's flat one (`DFlashDraftModel`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from outrider.engine.features import FeatureReduction, rms_norm
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles
from outrider.heads.layers import DecoderLayer
from outrider.heads.layouts import Layout, check_options, check_parallel, check_taps


class BlockLayer(DecoderLayer):
    """A decoder layer whose keys and values come from the target's features, and from the block's rows themselves."""

    def compute_block(
        self,
        rows: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        context: Tensor,
        places: Tensor,
        depths: Tensor,
    ) -> Tensor:
        """Computes the layer for the parallel rows [num_places, hidden_size], whose indices are `places`.

        `context`: [num_rows, hidden_size], the normed features of all rows. `depths`: [num_places] int64; each block's
        begin with 1.
        """
        return self(rows, angles, attend, context.index_copy(0, places, self.normed(rows)), places=places)


class DFlash(HeadModel):
    """A DFlash head."""

    form = "dflash"
    architectures: Collection[str] = ("DFlashDraftModel",)
    flags: tuple[str, ...] = ("sample_from_anchor", "sliding_window_non_causal")
    """Names of options. The second one concerns layers that are refused."""
    is_chained = False
    samples_from_anchor = False  # whether the row of the newest token drafts a token, unless the configuration says it

    def __init__(self, files: HeadFiles) -> None:
        self._layout = Layout.read(files, *self.flags)
        # z-lab's checkpoints have their options in `dflash_config` or at the top level.
        within = {key: value for key, value in (files.config.get("dflash_config") or {}).items() if value is not None}
        check_options(files, within, self.flags)
        self._options = {**files.config, **within}
        # In our code and in speculators, a tap has the number of the layer whose input it is. In z-lab's files, it has
        # the number of the layer whose output it is.
        name, offset = ("aux_hidden_state_layer_ids", 0) if self._layout.is_nested else ("target_layer_ids", 1)
        taps = check_taps(files, name, tuple(tap + offset for tap in self._options.get(name) or ()))
        hidden_size = files.target.hidden_size
        self.reduction = FeatureReduction(
            taps=taps,
            hidden_size=hidden_size,
            takes_final_norm=not self._layout.is_nested,  # z-lab takes transformers' hidden states; the last is normed
            projection=files.read("fc.weight", self._layout.shape.hidden_size, len(taps) * hidden_size),
        )

    def load(self, files: HeadFiles) -> None:
        shape, hidden = self._layout.shape, self._layout.shape.hidden_size
        for name in ("block_size", "mask_token_id"):
            if self._options.get(name) is None:
                raise files.refusal(name, None, "a number")
        block_size, mask_token_id = int(self._options["block_size"]), int(self._options["mask_token_id"])
        num_parallel = block_size - (not self._options.get("sample_from_anchor", self.samples_from_anchor))
        check_parallel(files, num_parallel, mask_token_id)
        self.parallel_feature = torch.zeros(hidden, device=files.device, dtype=files.dtype)  # its value does not matter
        self.target_ids = files.target_ids(self._layout.draft_vocab_size)
        self._epsilon = shape.epsilon
        self._embedding = files.embedding(hidden)
        self._context_norm = files.take("hidden_norm.weight", hidden)
        self._layers = [self._layer(files, index) for index in range(shape.num_layers)]
        self._norm = files.take("norm.weight", hidden)
        self._output = files.output_layer(hidden, self.target_ids)
        self._rotation = self._layout.rotation(files)
        self.spec = self._layout.spec(
            files,
            self.form,
            num_parallel=num_parallel,
            num_masks=block_size - 1,
            mask_token_id=mask_token_id,
            is_chained=self.is_chained,
            attends_both_ways=True,
        )

    def _layer(self, files: HeadFiles, index: int) -> BlockLayer:
        return BlockLayer(files, f"layers.{index}.", self._layout.shape, index)

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        angles = self._rotation.at(rows.positions)
        context = rms_norm(rows.features, self._context_norm, self._epsilon)
        (places,) = torch.nonzero(rows.depths, as_tuple=True)  # indices of the parallel rows
        hidden = self._embedding[rows.token_ids[places]]
        for layer in self._layers:
            hidden = layer.compute_block(hidden, angles, attend, context, places, rows.depths[places])
        return torch.zeros_like(context).index_copy(0, places, hidden)

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return self._output(self._normed(hidden)).float()

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self._norm, self._epsilon)
