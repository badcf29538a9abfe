"""Linear layers of a loaded model replaced by ours, projections of one input joined to one product.

Models are known by the names of projections only. Joined projections (q, k, v; gate, up) spare the threads meeting at
the end of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

PROJECTIONS_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""From a weight [out_features, in_features] and a bias [out_features] or None."""


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


@torch.no_grad()
def replace_linear_layers(model: nn.Module, make_linear: MakeLinear) -> None:
    """Replaces every plain nn.Linear in `model`.

    Weights are freed layer by layer: beside the new layers, at most those of one joint product are held. A weight that
    another module holds as well (an embedding tied to the output layer) stays there in its plain form. What stays is
    copied out of the checkpoint's mapping, one view of which would keep the whole file resident.
    """
    _replace(model, make_linear)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _replace(module: nn.Module, make_linear: MakeLinear) -> None:
    """Keeps no list of modules, which would keep their weights."""
    for names in PROJECTIONS_OF_ONE_INPUT:
        _join(module, names, make_linear)
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        if type(child) is nn.Linear:
            setattr(module, name, make_linear(child.weight.detach(), child.bias))
        else:
            _replace(child, make_linear)


def _join(module: nn.Module, names: Sequence[str], make_linear: MakeLinear) -> None:
    """Replaces `names` of `module` by shared projections when all are there and alike."""
    layers = [getattr(module, name, None) for name in names]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    if len(plain) < len(names) or len({(layer.in_features, layer.bias is None) for layer in plain}) != 1:
        return
    weight = torch.cat([layer.weight.detach() for layer in plain])
    biases = [layer.bias.detach() for layer in plain if layer.bias is not None]
    joined = make_linear(weight, torch.cat(biases) if biases else None)
    sizes = [layer.out_features for layer in plain]
    last: list[tuple[Tensor, ...]] = [()]
    for index, name in enumerate(names):
        setattr(module, name, SharedProjection(joined, sizes, index, last))
