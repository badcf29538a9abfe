"""Adapters (LoRA) of models that torch computes: layer by layer, or through a fused decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.modules import NativeLayers, NativeLinear
from outrider.engine.input_batch import InputBatch
from outrider.engine.low_rank import LowRanks, PackedAdapter
from outrider.engine.transfer import upload
from outrider.errors import InternalError, ModelError


class TorchAdapter(PackedAdapter):
    """An adapter on a model's device, in float32.

    Its products are computed like the model's own, so rows have the same bits in any batch if those of the model have.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: LowRanks,
        *,
        native: NativeLayers | None = None,
        device: torch.device | str = "cpu",
        is_deterministic: bool = False,
    ) -> None:
        """Makes an adapter for a transformers model.

        Args:
            model: the model, perhaps with replaced layers.
            parts: what the adapter adds to each layer.
            native: the model's native layers, if it has any.
            device: the model's device.
            is_deterministic: whether a GPU's rows must have the same bits in any batch.

        Raises:
            ModelError: if the adapter changes a layer that the model does not have, or one of another size.
        """
        make_linear = _linear_maker(native, device, is_deterministic=is_deterministic)
        self._num_bytes = 0
        self._pairs: dict[str, tuple[nn.Module, nn.Module]] = {}  # by the layer's name: down, up
        for name, part in parts.items():
            layer = _find_layer(model, name)
            found, own = (part.down.shape[1], len(part.up)), (layer.in_features, layer.out_features)
            if found != own:
                raise ModelError(
                    f"the adapter's {name} maps {found[0]} to {found[1]} features, the model's {own[0]} to {own[1]}"
                )
            self._pairs[name] = make_linear(torch.tensor(part.down)), make_linear(torch.tensor(part.up))
            self._num_bytes += part.down.nbytes + part.up.nbytes

    @property
    def num_bytes(self) -> int:
        """Implements PackedAdapter.num_bytes."""
        return self._num_bytes

    @property
    def layer_names(self) -> Iterator[str]:
        """The names of the layers that it changes, as in the model."""
        return iter(self._pairs)

    def product(self, name: str, rows: Tensor) -> Tensor | None:
        """Returns what it adds to a layer's output for rows […, in_features]: float32; None: nothing."""
        if (pair := self._pairs.get(name)) is None:
            return None
        down, up = pair
        added: Tensor = up(down(rows.float()))
        return added


class AdapterRows:
    """The rows of a batch that have adapters."""

    def __init__(self, batch: InputBatch, device: torch.device | str) -> None:
        starts = batch.arrays.query_start_loc
        rows: dict[TorchAdapter, list[int]] = {}
        for index, adapter in enumerate(batch.adapters):
            if adapter is not None:
                assert isinstance(adapter, TorchAdapter)
                rows.setdefault(adapter, []).extend(range(starts[index], starts[index + 1]))
        self._num_rows = batch.num_rows
        self._rows = [(adapter, upload(np.array(numbers), torch.device(device))) for adapter, numbers in rows.items()]

    def add(self, name: str, rows: Tensor, output: Tensor) -> None:
        """Adds the adapters' products to a layer's output [num_rows, out_features], in place.

        `rows` are the layer's input [num_rows, in_features]; both may have a leading dimension of 1. Raises:
        InternalError if the layer did not get all rows of the batch.
        """
        if rows.shape[-2] != self._num_rows or rows.numel() != self._num_rows * rows.shape[-1]:
            raise InternalError(f"{name} got {tuple(rows.shape)} for a batch of {self._num_rows} rows with adapters")
        for adapter, numbers in self._rows:
            added = adapter.product(name, rows.index_select(-2, numbers))
            if added is not None:
                changed = output.index_select(-2, numbers).float() + added
                output.index_copy_(-2, numbers, changed.to(output.dtype))

    def add_joined(self, names: Sequence[str], sizes: Sequence[int], rows: Tensor, output: Tensor) -> None:
        """Adds to layers whose outputs of these sizes are side by side in `output`; otherwise as `add`."""
        for name, part in zip(names, output.split(sizes, dim=-1), strict=True):
            self.add(name, rows, part)

    @contextmanager
    def added_in(self, model: nn.Module) -> Iterator[None]:
        """Adds the adapters' products in the model's own modules while the context lasts."""

        def hook(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.add(name, inputs[0], output)

        names = {name for adapter, _ in self._rows for name in adapter.layer_names}
        handles = [model.get_submodule(name).register_forward_hook(partial(hook, name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _linear_maker(
    native: NativeLayers | None, device: torch.device | str, *, is_deterministic: bool
) -> Callable[[Tensor], nn.Module]:
    """Returns a function that makes a linear layer without bias from a weight [out_features, in_features] float32."""
    if native is not None:
        own = NativeLayers(native.kernels)  # its memory is freed with the adapter
        return lambda weight: NativeLinear(own, weight, None)
    if is_deterministic:
        from outrider.engine.deterministic_layers import DeterministicLinear  # imports triton

        return lambda weight: DeterministicLinear(weight.to(device), None)

    def make_linear(weight: Tensor) -> nn.Module:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(device), requires_grad=False)
        return linear

    return make_linear


def _find_layer(model: Any, name: str) -> Any:
    """Returns a linear layer of the model's decoder through which every row of a step goes.

    Raises: ModelError if there is none.
    """
    decoder = model.get_decoder()
    prefix = next(own for own, module in model.named_modules() if module is decoder)
    inner = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else ""
    try:
        layer: Any = decoder.get_submodule(inner) if inner else None
    except AttributeError:
        layer = None
    # A model's own linear class, such as a router of experts, may return something else than one tensor.
    is_known = type(layer) is nn.Linear or not type(layer).__module__.startswith("transformers.models.")
    if not (is_known and isinstance(getattr(layer, "in_features", None), int)) or "._" in inner:
        raise ModelError(f"the adapter changes {name}, which is no linear layer of the model")
    if sum(part.isdigit() for part in inner.split(".")) != 1:
        raise ModelError(f"the adapter changes {name}, but adapters of single experts are not supported")
    return layer
