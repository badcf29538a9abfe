"""DFlash 2: a DFlash head with local convolutions in its layers, whose tokens are chosen one after another.

In each layer, inputs and outputs of attention and of the feed-forward part are convolved over the block's rows, with
kernels that a projection of the input changes row by row. A selector scores the likeliest candidates for a token by
the token before: logit + sum(embedding(previous) · projection(state) · embedding(candidate)).

Source: z-lab's DFlash 2. Layouts: speculators (`speculators_model_type` dflash2), and a flat one (`DFlash2DraftModel`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from outrider.heads.base import Attend
from outrider.heads.forms.dflash import BlockLayer, DFlash
from outrider.heads.head_files import HeadFiles
from outrider.heads.layers import LayerShape

_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


class Convolutions:
    """Two causal convolutions over a block's rows: one for the input of a layer's part, and one for its output.

    A kernel is a learned one plus one that is computed from the input row, with equal values in a group of channels.
    """

    def __init__(self, files: HeadFiles, name: str, hidden: int, *, size: int, group: int) -> None:
        """Takes the weights. `size`: rows that a kernel sees; `group`: channels."""
        self._size, self._group, self._hidden = size, group, hidden
        self._kernels = files.take(f"{name}.base_kernel", 2, size, hidden)
        self._projection = files.take_linear({f"{name}.kernel_projection": 2 * size * (hidden // group)}, hidden)

    def before(self, rows: Tensor, depths: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns the convolved input [num_rows, hidden], and the function that convolves the part's output.

        `depths`: [num_rows] int64; each block's begin with 1.
        """
        own = self._projection(rows).view(len(rows), 2, self._size, self._hidden // self._group)
        own = own.repeat_interleave(self._group, -1)
        of_input, of_output = (self._kernels + own).unbind(1)
        return self._convolved(rows, of_input, depths), lambda out: self._convolved(out, of_output, depths)

    def _convolved(self, rows: Tensor, kernels: Tensor, depths: Tensor) -> Tensor:
        """Convolves rows [num_rows, hidden] with kernels [num_rows, size, hidden]; no row sees another block."""
        shifted = [
            torch.where((depths > back)[:, None], pad(rows, (0, 0, back, 0))[: len(rows)], 0)
            for back in range(self._size)
        ]
        return (torch.stack(shifted, 1) * kernels).sum(1)


class ConvolvedLayer(BlockLayer):
    """A block's layer with convolutions around attention and around the feed-forward part."""

    def __init__(self, files: HeadFiles, prefix: str, shape: LayerShape, index: int, **sizes: int) -> None:
        super().__init__(files, prefix, shape, index)
        self._around_attention, self._around_mlp = (
            Convolutions(files, f"{prefix}{part}_conv", shape.hidden_size, **sizes) for part in ("attention", "mlp")
        )

    def compute_block(
        self,
        rows: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        context: Tensor,
        places: Tensor,
        depths: Tensor,
    ) -> Tensor:
        given, after = self._around_attention.before(self.normed(rows), depths)
        rows = rows + after(self.attention(context.index_copy(0, places, given), angles, attend, places))
        given, after = self._around_mlp.before(self.normed_again(rows), depths)
        return rows + after(self.feed_forward(given))


class DFlash2(DFlash):
    """A DFlash 2 head."""

    form = "dflash2"
    architectures = ("DFlash2DraftModel",)
    is_chained = True

    def load(self, files: HeadFiles) -> None:
        hidden, vocab_size = self._layout.shape.hidden_size, files.target.vocab_size
        size, group, rank, self._top = (int(self._options.get(name, value)) for name, value in _DEFAULTS.items())
        self._convolution, block_size = {"size": size, "group": group}, int(self._options.get("block_size") or 0)
        if group < 1 or hidden % group:
            raise files.refusal("conv_group_size", group, f"divisors of {hidden}")
        if not 1 <= size <= (block_size or size):
            raise files.refusal("conv_kernel_size", size, "1 to block_size")
        if not 1 <= self._top <= vocab_size:
            raise files.refusal("selector_top_k", self._top, f"1 to {vocab_size}")
        if self._layout.draft_vocab_size != vocab_size:
            raise files.refusal("draft_vocab_size", self._layout.draft_vocab_size, f"the whole vocabulary {vocab_size}")
        self._before, self._candidates = (
            files.take(f"candidate_selector.{name}_codebook", vocab_size, rank) for name in ("predecessor", "successor")
        )
        self._to_rank = files.take_linear({"candidate_selector.hidden_projection": rank}, hidden)
        super().load(files)

    def _layer(self, files: HeadFiles, index: int) -> BlockLayer:
        return ConvolvedLayer(files, f"layers.{index}.", self._layout.shape, index, **self._convolution)

    def logits_after(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        best, ids = logits.topk(self._top, -1)
        known = embedding(previous[:, -1], self._before) * self._to_rank(self._normed(hidden[:, -1]))
        scores = best + (known[:, None] * embedding(ids, self._candidates)).sum(-1).float()
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, scores), None
