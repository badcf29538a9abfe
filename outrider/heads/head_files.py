"""Reads the folder of a head. Tensors and options that its form does not know are refused, never ignored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.spec import HeadSpec

_NEVER_READ = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Endings of the names of tensors that are never read, because they serve only training or repeat another tensor."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Place(NamedTuple):
    """The rows of a loaded weight that hold a stored tensor's values."""

    weight: Tensor
    rows: slice


class HeadFiles:
    """The checkpoint of a head, its target, and the device and dtype of the weights that are read.

    It records which tensors were read; `spec` refuses the others.
    """

    def __init__(self, checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.folder, self.config = checkpoint.folder, checkpoint.config
        self.target = target
        self.device = device
        self.dtype = dtype
        self.target_dtype: torch.dtype | None = None  # dtype of the target's tensors as returned; None: `dtype`
        self._stored = {name: name for name in checkpoint.tensor_names if not name.endswith(_NEVER_READ)}
        self._left = set(self._stored)
        self._digest = hashlib.sha256(checkpoint.config_json)
        self.places: dict[str, Place] = {}
        """Places of the weights that were taken, by stored name."""

    # --- tensors, each read once ----------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that describe the head, after `rename`."""
        return frozenset(self._stored)

    def rename(self, short: Callable[[str], str]) -> None:
        """Renames tensors by `short(stored name)`. Error messages still contain the stored names."""
        self._stored = {short(name): name for name in self._stored.values()}

    def read(self, name: str, *shape: int) -> Tensor:
        """Returns weights as they are stored. They are copied, because a head's files may be replaced while it drafts.

        `shape`: the expected shape; empty: any. Raises: ModelError if the tensor is missing, has another shape, is
        quantised, or has values that are not finite.
        """
        tensor, name = self._mapped(name, *shape), self._stored.get(name, name)
        if tensor.dtype not in _TYPES:
            raise ModelError(f"{self.folder}: {name} is of {tensor.dtype}; quantised weights are not supported")
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise ModelError(f"{self.folder}: {name} has values that are not finite")
        return self._placed(name, tensor.clone())

    def take(self, name: str, *shape: int) -> Tensor:
        """Reads weights and converts them to the head's device and dtype. Arguments and errors are those of `read`."""
        return self._placed(name, self.read(name, *shape).to(self.device, self.dtype))

    def take_if(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self._stored else None

    def take_linear(self, sizes: Mapping[str, int], width: int) -> Linear:
        """Takes several projections of one input as one layer. `sizes`: each projection's number of outputs, by name.

        If the checkpoint has biases for only some of them, the other biases are zero.
        """
        weights = {f"{name}.weight": self.take(f"{name}.weight", size, width) for name, size in sizes.items()}
        biases = {f"{name}.bias": self.take_if(f"{name}.bias", size) for name, size in sizes.items()}
        weight = self._joined(weights)
        if all(bias is None for bias in biases.values()):
            return Linear(weight)
        sized = zip(biases.items(), sizes.values(), strict=True)
        all_biases = {name: weight.new_zeros(size) if bias is None else bias for (name, bias), size in sized}
        return Linear(weight, self._joined(all_biases))

    def drop(self, *names: str) -> None:
        """Marks tensors as known although the form does not need them, so that `spec` does not refuse them."""
        self._left -= {self._stored.get(name, name) for name in names}

    def _mapped(self, name: str, *shape: int) -> Tensor:
        stored = self._stored.get(name, name)
        tensor = self.checkpoint.mapped(stored, shape or None)
        self._left.discard(stored)
        self._digest.update(stored.encode())
        self._digest.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        return tensor

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        self.places[self._stored.get(name, name)] = Place(tensor, slice(None))
        return tensor

    def _joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        joined, start = torch.cat(list(tensors.values())), 0
        for name, tensor in tensors.items():
            self.places[self._stored.get(name, name)] = Place(joined, slice(start, start := start + len(tensor)))
        return joined

    # --- tensors that most heads have -----------------------------------------------------

    def embedding(self, width: int) -> Tensor:
        """Takes the head's embedding [vocab_size, width], or the target's if it has none."""
        own = self.take_if("embed_tokens.weight", self.target.vocab_size, width)
        return self.target_embedding(width) if own is None else own

    def output_layer(self, width: int, target_ids: Tensor | None = None) -> Linear:
        """Takes the head's output layer, or, if it has none, the target's rows for the ids that it drafts."""
        num_ids = self.target.vocab_size if target_ids is None else len(target_ids)
        own = self.take_if("lm_head.weight", num_ids, width)
        return self.target_output(width, target_ids) if own is None else Linear(own)

    def target_embedding(self, width: int) -> Tensor:
        return self._of_target(self.target.embedding(), width)

    def target_output(self, width: int, target_ids: Tensor | None = None) -> Linear:
        weight = self._of_target(self.target.output_layer(), width)
        return Linear(weight if target_ids is None else weight[target_ids])

    def target_ids(self, size: int) -> Tensor | None:
        """Returns [size] int64: the target's id for each of the head's ids; None if the ids are equal.

        The tensor `d2t` holds the differences between the target's ids and the head's.
        """
        if size == self.target.vocab_size and "d2t" not in self._stored:
            return None
        target_ids = self.ids("d2t", size, is_relative=True)
        is_alike = size == self.target.vocab_size and bool((target_ids.diff() == 1).all())
        return None if is_alike else target_ids

    def ids(self, name: str, size: int, *, is_relative: bool = False) -> Tensor:
        """Takes the tensor `name`, which holds ids of the target, and returns them: [size] int64.

        `is_relative`: each id is stored as its difference from its index.
        Raises: ModelError for an id outside the target's vocabulary, or a duplicate.
        """
        ids = self._mapped(name, size).to(torch.int64)
        if is_relative:
            ids = ids + torch.arange(size)
        lowest, highest = ids.aminmax()
        if lowest < 0 or highest >= self.target.vocab_size or len(set(ids.tolist())) < size:
            allowed = f"0 … {self.target.vocab_size - 1}"
            raise ModelError(f"{self.folder}: {name} has ids outside {allowed}, or the same id twice")
        return ids.to(self.device)

    def _of_target(self, tensor: Tensor, width: int) -> Tensor:
        shape = (self.target.vocab_size, width)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: the target's tensor that it shares is {tuple(tensor.shape)}, not {shape}")
        return tensor.to(self.device, self.target_dtype or self.dtype)

    # --- errors, and the result -----------------------------------------------------------

    def refusal(self, name: str, value: object, allowed: str) -> ConfigError:
        """Returns the error for a field of the configuration whose value is not supported."""
        return ConfigError(f"head {self.folder}: {name} is {value!r}; supported: {allowed}")

    def check_fits(self, **pairs: tuple[int, int]) -> None:
        """Checks that each pair (head's, target's) is equal. Raises: ConfigError, which names all differences."""
        wrong = [
            f"{name} {head} of the head, {target} of the target"
            for name, (head, target) in pairs.items()
            if head != target
        ]
        if wrong:
            raise ConfigError(f"head {self.folder} was made for another target: {'; '.join(wrong)}")

    def spec(self, form: str, **fields: Any) -> HeadSpec:
        """Returns the spec of a head that has read all its tensors. The head can draft in its target's whole window.

        `fields`: other fields of HeadSpec. Raises: ConfigError, which names tensors that the form does not know.
        """
        if self._left:
            names = ", ".join(sorted(self._left)[:8])
            raise ConfigError(f"head {self.folder} has tensors that its form does not know: {names}")
        return HeadSpec(
            form=form,
            name=self.folder.name,
            fingerprint=self._digest.hexdigest(),
            vocab_size=self.target.vocab_size,
            max_model_len=self.target.max_model_len,
            dtype=str(self.dtype).removeprefix("torch."),
            **fields,
        )


class Linear:
    """The linear layer x · weightᵀ + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [num_out, num_in]
        self.bias = bias  # [num_out]

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows, self.weight, self.bias)

    def part(self, outputs: slice) -> Linear:
        """Returns the layer that gives only these outputs, over the same weights."""
        return Linear(self.weight[outputs], None if self.bias is None else self.bias[outputs])
