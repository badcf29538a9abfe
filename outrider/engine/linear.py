"""Linear layers as the CPU likes them: weights packed once, sibling projections as one product.

torch's F.linear hands float32 products on a CPU to MKL, which reads plain weights. For
the 2 to 16 rows of a verification that costs up to four times what one row costs,
although the time should be that of reading the weights. oneDNN with weights reordered
beforehand reads them at the memory's speed up to about 16 rows (figures in
benchmarks/LOG.md). Projections of the same input (q, k, v; gate, up) become one product,
which spares the threads meeting at the end of each.

Native kernels come in by the same door: `pack_linear_layers` replaces modules after loading
by whatever it is given to make them with, and knows nothing of models beyond the names of
projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

PROJECTIONS_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""From a weight [out_features, in_features] and a bias [out_features] or None."""


class PackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's own layout. Holds no plain copy of W."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)  # noqa: SLF001
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """[…, in_features] → […, out_features]."""
        if rows.numel() == 0:
            return rows.new_empty((*rows.shape[:-1], self.out_features))
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")  # noqa: SLF001
        return output

    @property
    def weight(self) -> Tensor:
        """A plain copy, [out_features, in_features], for the rare code that asks a layer for its weight."""
        plain: Tensor = self._packed.to_dense()
        return plain


class SharedProjection(nn.Module):
    """One of several projections of the same input, computed together by whichever is called first.

    The products are handed over through `_last`, one tuple that is replaced as a whole: a
    sibling that meets another input, or another thread's, computes anew and is right.
    """

    def __init__(self, joined: nn.Module, sizes: Sequence[int], index: int, last: list[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._joined = joined
        self._sizes = tuple(sizes)
        self._index = index
        self._last = last  # one element, shared by the siblings: (input, its products …)

    def forward(self, rows: Tensor) -> Tensor:
        """[…, in_features] → […, sizes[index]], a view into the joint product."""
        last = self._last[0]
        if not last or last[0] is not rows:
            last = (rows, *self._joined(rows).split(self._sizes, dim=-1))
            self._last[0] = last
        if self._index == len(self._sizes) - 1:
            self._last[0] = ()  # the last one asks: free the input and the products
        return last[1 + self._index]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed product is there and fast for this dtype: float32 anywhere, bfloat16 with AVX-512."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    )


@torch.no_grad()
def pack_linear_layers(model: nn.Module, make_linear: MakeLinear = PackedLinear) -> int:
    """Replaces every plain nn.Linear in `model`, dropping its weight as it goes; returns how many there were.

    A weight that another module holds as well (an embedding tied to the output layer)
    stays there in its plain form. What stays is copied out of the checkpoint's mapping,
    one view of which would keep the whole file resident.
    """
    replaced = 0
    for module in list(model.modules()):
        for names in PROJECTIONS_OF_ONE_INPUT:
            replaced += _join(module, names, make_linear)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, make_linear(child.weight.detach(), child.bias))
                replaced += 1
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return replaced


def _join(module: nn.Module, names: Sequence[str], make_linear: MakeLinear) -> int:
    """Replaces `names` of `module` by shared projections when all are there and alike; returns how many it replaced."""
    layers = [getattr(module, name, None) for name in names]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    if len(plain) < len(names) or len({(layer.in_features, layer.bias is None) for layer in plain}) != 1:
        return 0
    weight = torch.cat([layer.weight.detach() for layer in plain])
    biases = [layer.bias.detach() for layer in plain if layer.bias is not None]
    joined = make_linear(weight, torch.cat(biases) if biases else None)
    sizes = [layer.out_features for layer in plain]
    last: list[tuple[Tensor, ...]] = [()]
    for index, name in enumerate(names):
        setattr(module, name, SharedProjection(joined, sizes, index, last))
    return len(names)
