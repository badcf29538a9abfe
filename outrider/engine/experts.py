"""Replaces the experts of a loaded model (mixture of experts) and the products of its routers by ours.

Experts are recognised by what transformers' `use_experts_implementation` says about them, and the function between
their products by what it computes. Experts of another form are left to torch. Routers stay transformers' own modules;
only their product is replaced, because the rest of a router is computed row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.engine.linear import MakeLinear

_LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "down_proj")
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""The names of the weights of gated experts, each [num_experts, out_features, in_features], or transposed."""
_MAX_VECTOR_SIZE = 64
"""Maximum number of elements in one of torch's vectors: two AVX-512 registers of bfloat16."""
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, nn.functional.sigmoid)
_CONVERSIONS = (Tensor.float, Tensor.to, Tensor.type, Tensor.view, Tensor.reshape)

MakeExperts = Callable[[Any], nn.Module | None]
"""Makes a layer from transformers' experts, or None if it cannot compute these."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What experts do between their products: see OutriderExperts in cpu_kernels/source/api.h."""

    activation: int = 0  # the numbers below are 1, 0 and 0 unless it is 2
    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Computes it for tensors of one shape."""
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == 1:
            return nn.functional.gelu(gate, approximate="tanh") * up
        return gate * (gate * self.alpha).sigmoid() * (up + self.shift)


def are_experts(module: Any) -> bool:
    """Returns whether the module consists of plain experts that transformers can exchange, without norms."""
    has_norms = getattr(module, "has_post_expert_norm", False)  # older versions of transformers have no such experts
    is_known = all(hasattr(module, name) for name in _LAYOUT) and not has_norms
    return is_known and module.down_proj.dtype in TORCH_DTYPES.values()


def gate_of(experts: Any) -> Gate | None:
    """Returns the function between the products of experts, or None if the kernels cannot compute it."""
    if not experts.has_gate:
        return None
    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    rows = 9.0 * torch.randn((4, 2 * width), generator=torch.Generator().manual_seed(0))  # far beyond usual limits
    gate, up = (rows[:, part] for part in _gate_and_up(experts, 2 * width))
    alpha, limit = (float(getattr(experts, name, None) or 0.0) for name in ("alpha", "limit"))
    expected = experts._apply_gate(rows)  # noqa: SLF001 the name that transformers gives it in any experts
    candidates = (Gate(), Gate(1), Gate(2, alpha, limit, shift=1.0), Gate(2, limit=limit))
    return next((each for each in candidates if torch.allclose(each(gate, up), expected, 1e-5, 1e-5)), None)


def linears_of(experts: Any, index: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields the weight [out_features, in_features] and bias of one expert's gate, up and down projection."""
    for name in EXPERT_WEIGHTS:
        weight = getattr(experts, name)[index].detach()
        weight = weight.T if experts.is_transposed else weight
        bias = getattr(experts, f"{name}_bias")[index].detach() if experts.has_bias else None
        for part in _gate_and_up(experts, len(weight)) if name == EXPERT_WEIGHTS[0] else (slice(None),):
            yield weight[part].contiguous(), None if bias is None else bias[part].contiguous()


def _gate_and_up(experts: Any, size: int) -> tuple[slice, slice]:
    """Returns the places of gates and of other values among the `size` outputs of a joined projection."""
    half = size // 2
    return (slice(half), slice(half, None)) if experts.is_concatenated else (slice(0, None, 2), slice(1, None, 2))


def in_whole_vectors(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies an elementwise function so that it computes every element in the same way, wherever it is in the batch.

    torch computes elementwise functions in vectors on a CPU, and the remaining elements with other code, whose
    exponential differs in the last bit. Padding avoids a remainder. Each of torch's threads would have a remainder, so
    torch must use one thread.
    """
    flat = rows.reshape(-1)
    padded = nn.functional.pad(flat, (0, -flat.numel() % _MAX_VECTOR_SIZE))
    return function(padded)[: flat.numel()].view(rows.shape)


class GateLogits(Tensor):
    """Logits of a router or of a shared expert's gate, whose sigmoid is computed in whole vectors."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes `function`; logits in another dtype or shape still are of this class."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 as torch's documentation asks
            if function in _SIGMOIDS:
                return in_whole_vectors(torch.sigmoid, arguments[0])
            result = function(*arguments, **(keywords or {}))
            return result.as_subclass(cls) if function in _CONVERSIONS else result


class RouterWeight:
    """Stands for a router's weight [num_experts, in_features] as an argument of torch's `linear`.

    The product is made by our linear layer, in float32, and rounded to the type of the rows. Other functions and
    attributes get the weight itself.
    """

    def __init__(self, weight: Tensor, make_linear: MakeLinear) -> None:
        self.plain, self.layer = weight, make_linear(weight.float(), None)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the weight. Conversions return this object, because products are made in float32."""
        return (lambda *_arguments: self) if name in ("float", "to", "type") else getattr(self.plain, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes `function` with at least one argument of this class."""
        if function is nn.functional.linear:
            rows, weight, bias = (*arguments, *(keywords or {}).values(), None)[:3]
            if isinstance(weight, cls):
                logits = weight.layer(rows.float())
                return (logits if bias is None else logits + bias.float()).to(rows.dtype).as_subclass(GateLogits)
        plain = [each.plain if isinstance(each, cls) else each for each in arguments]
        return function(*plain, **(keywords or {}))


@torch.no_grad()
def replace_experts(model: nn.Module, make_experts: MakeExperts, make_linear: MakeLinear) -> None:
    """Replaces the experts of `model` for which `make_experts` makes a layer, and the products of their routers.

    A router is a module beside experts with a `weight` of one row per expert. `make_linear` gets it in float32. No list
    of modules is made, since a list would keep their weights alive.
    """
    for name in [name for name, _ in model.named_children()]:
        num_experts: Any = getattr(model.get_submodule(name), "num_experts", None)
        made = make_experts(model.get_submodule(name)) if are_experts(model.get_submodule(name)) else None
        if made is None:
            replace_experts(model.get_submodule(name), make_experts, make_linear)
            continue
        setattr(model, name, made)
        for router in model.children():
            _replace_product(router, num_experts, make_linear)


def _replace_product(module: Any, num_experts: int, make_linear: MakeLinear) -> None:
    """Replaces the weight of a router by a RouterWeight. Does nothing if the module is no router."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and type(module) is not nn.Linear and weight.shape[:-1] == (num_experts,):
        del module.weight
        module.weight = RouterWeight(weight.detach(), make_linear)
