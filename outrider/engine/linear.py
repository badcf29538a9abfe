"""Replaces linear layers and RMS norms of a loaded model by ours, and joins projections of one input into one product.

Projections are recognised by their names only, and norms by what they compute. Joining projections (q, k, v; gate, up)
saves the thread barrier at the end of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""Makes a layer from a weight [out_features, in_features] and a bias [out_features] or None."""

MakeNorm = Callable[[Tensor, float, bool], nn.Module]
"""Makes a norm from a weight [width] float32, the epsilon added to the mean square, and whether it rounds only once:
after the product with the weight (Gemma, OLMo 2) instead of before it as well (Llama)."""

_ALLOWED_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
"""Allowed difference between the outputs of two norms, by dtype. It is relative to the output; if the norm adds one to
its weight, it is relative to the sum of the output and the output for a weight of one. It allows for rounding, but not
for a different function."""


class SharedProjection(nn.Module):
    """One of several projections of the same input. The first one that is called computes all of them.

    It passes the products to its siblings in a tuple in `_last`, which is always replaced as a whole. A sibling that
    finds the products of another input, for example from another thread, computes its own, so its result is correct.
    """

    def __init__(
        self, joined: nn.Module, sizes: Sequence[int], index: int, last: list[tuple[Tensor, ...]], in_features: int
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, sizes[index]
        self._joined = joined
        self._sizes = tuple(sizes)
        self._index = index
        self._last = last  # one element, shared by the siblings: (input, its products …)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps […, in_features] to […, sizes[index]], a view of the joint product."""
        last = self._last[0]
        if not last or last[0] is not rows:
            last = (rows, *self._joined(rows).split(self._sizes, dim=-1))
            self._last[0] = last
        if self._index == len(self._sizes) - 1:
            self._last[0] = ()  # the last sibling frees the input and the products
        return last[1 + self._index]


@torch.no_grad()
def replace_linear_layers(model: nn.Module, make_linear: MakeLinear) -> None:
    """Replaces every plain nn.Linear in `model`.

    Old weights are freed layer by layer, so memory holds the new layers and the old weights of at most one joint
    product. A weight that another module shares (an embedding tied to the output layer) stays in that module in its
    plain form. The remaining tensors are copied out of the checkpoint's mapping, since a single view would keep the
    whole file resident.
    """
    _replace(model, make_linear)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _replace(module: nn.Module, make_linear: MakeLinear) -> None:
    """Replaces layers recursively. It makes no list of modules, since a list would keep their weights alive."""
    for names in PROJECTIONS_OF_ONE_INPUT:
        _join(module, names, make_linear)
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        if type(child) is nn.Linear:
            setattr(module, name, make_linear(child.weight.detach(), child.bias))
        else:
            _replace(child, make_linear)


def _join(module: nn.Module, names: Sequence[str], make_linear: MakeLinear) -> None:
    """Replaces the layers `names` of `module` by shared projections if all are plain, and all or none have a bias."""
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
        setattr(module, name, SharedProjection(joined, sizes, index, last, weight.shape[1]))


@torch.no_grad()
def replace_norms(model: nn.Module, make_norm: MakeNorm) -> None:
    """Replaces the RMS norms of `model`, whatever the names of their classes.

    A module counts as an RMS norm if its outputs equal those of RMS normalisation with its weight or, as in Gemma, with
    one plus its weight.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            norm = _as_norm(child, make_norm)
            if norm is not None:
                setattr(module, name, norm)


def _as_norm(module: Any, make_norm: MakeNorm) -> nn.Module | None:
    """Returns our norm that computes the same as `module` on random rows, or None if no candidate does.

    The rows include the cases that tell norms apart: one has a mean, which a layer norm subtracts, and one is so small
    that epsilon matters. Outputs are compared one by one, because a trained norm has some weights in the hundreds and
    some near zero. A tolerance relative to the largest output would hide differences at those near zero.
    """
    weight: Any = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    has_one_weight = [name for name, _ in module.named_parameters()] == ["weight"] and not list(module.children())
    if not (has_one_weight and weight.ndim == 1 and isinstance(epsilon, float)):
        return None
    if weight.dtype not in _ALLOWED_DIFFERENCE:
        return None
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[1.0], [1.0], [max(epsilon, 1e-12) ** 0.5], [30.0]])
    rows = torch.randn((4, weight.numel()), generator=generator) * scales
    rows = (rows + torch.tensor([[0.0], [2.0], [0.0], [0.0]])).to(weight.device, weight.dtype)
    try:
        expected = module(rows)
    except (RuntimeError, TypeError):
        return None
    if expected.shape != rows.shape or expected.dtype != rows.dtype:
        return None
    expected = expected.float()
    kinds = [(offset, rounds_once) for offset in (0.0, 1.0) for rounds_once in (False, True)]
    candidates = [make_norm(offset + weight.detach().float(), epsilon, once) for offset, once in kinds]
    differences = [(norm(rows).float() - expected).abs() for norm in candidates]
    best = min(range(len(kinds)), key=lambda kind: float(differences[kind].sum()))
    of_one = make_norm(torch.ones_like(weight, dtype=torch.float32), epsilon, kinds[best][1])(rows).float()
    allowed = _ALLOWED_DIFFERENCE[weight.dtype] * (expected.abs() + kinds[best][0] * of_one.abs())
    return candidates[best] if bool((differences[best] <= allowed).all()) else None
