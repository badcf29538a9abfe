"""The files of a head, and those of its target as far as a head needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.heads.base import HeadSpec
from outrider.model_hub.vocabulary import read_json

MAX_PARALLEL = 64
"""Tokens of one forward."""

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with config.json and safetensors, which are mapped: what is not read takes no memory."""

    folder: Path
    config: Mapping[str, Any]
    _files: dict[str, Any] = field(repr=False)  # by tensor name: the open file that has it

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises: ModelError for a folder without them, or with damaged ones."""
        folder = folder.absolute()  # "." has no name; links stay, as they may be turned to another head
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json")
        files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
        return cls(folder, read_json(folder / "config.json"), files)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._files)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A copy of weights: a head's files may be replaced while it drafts.

        Raises: ModelError when there are none, of another shape, quantised, or with values that are not finite.
        """
        tensor = self.mapped(name, shape)
        if tensor.dtype not in _WEIGHT_TYPES:
            raise ModelError(f"{self.folder}: {name} is of {tensor.dtype}; quantised weights are not supported")
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            raise ModelError(f"{self.folder}: {name} has values that are not finite")
        return tensor.clone()

    def mapped(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The file's own memory. Raises: ModelError when there is none of this name, or of another shape."""
        if name not in self._files:
            other = "" if self._files else ": weights are read from *.safetensors, to which others can be converted"
            raise ModelError(f"{self.folder} has no tensor {name}{other}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {tuple(tensor.shape)}, not {shape}")
        return tensor

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of the configuration and the weight files."""
        digest = hashlib.sha256()
        for path in (self.folder / "config.json", *sorted(self.folder.glob("*.safetensors"))):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head drafts for: its checkpoint, of which only what a head shares is read."""

    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> Target:
        """Raises: ModelError."""
        return cls(Checkpoint.open(folder))

    @property
    def config(self) -> Mapping[str, Any]:
        """Of the text model, where the checkpoint has several."""
        return self.checkpoint.config.get("text_config") or self.checkpoint.config

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """Tokens."""
        return int(self.config["max_position_embeddings"])

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]. Raises: ModelError for a checkpoint that keeps it under no known name."""
        return self._first("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")

    def output_layer(self) -> Tensor:
        """[vocab_size, hidden_size]; the embedding where they are tied."""
        if "lm_head.weight" in self.checkpoint.tensor_names:
            return self.checkpoint.mapped("lm_head.weight")
        return self.embedding()

    def final_norm(self) -> Tensor:
        """[hidden_size]."""
        return self._first("model.norm.weight", "norm.weight")

    def _first(self, *names: str) -> Tensor:
        for name in names:
            if name in self.checkpoint.tensor_names:
                return self.checkpoint.mapped(name)
        raise ModelError(f"{self.checkpoint.folder} has none of {', '.join(names)}")


def spec_of(form: str, checkpoint: Checkpoint, target: Target, dtype: torch.dtype, **fields: Any) -> HeadSpec:
    """Of a head that drafts for texts as long as its target takes. `fields`: the other ones of HeadSpec."""
    return HeadSpec(
        form=form,
        name=checkpoint.folder.name,
        fingerprint=checkpoint.fingerprint,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        **fields,
    )


def refuse(folder: Path, name: str, value: object, allowed: str) -> ConfigError:
    """The error for a field of a head's configuration that is not supported."""
    return ConfigError(f"head {folder}: {name} is {value!r}; supported: {allowed}")


def check_target_ids(folder: Path, name: str, target_ids: Tensor, vocab_size: int) -> None:
    """`target_ids` [draft_vocab_size] int64. Raises: ModelError for ids outside the vocabulary, or for one twice."""
    least, most = target_ids.aminmax()
    if least < 0 or most >= vocab_size or len(set(target_ids.tolist())) < len(target_ids):
        raise ModelError(f"{folder}: {name} leads to ids outside of 0 … {vocab_size - 1}, or to one twice")


def check_parallel(folder: Path, num_parallel: int, mask_token_id: int, vocab_size: int) -> None:
    """Of a head that drafts `num_parallel` tokens in one forward. Raises: ConfigError."""
    if not 0 < num_parallel <= MAX_PARALLEL:
        raise refuse(folder, "the number of tokens in a forward", num_parallel, f"1 to {MAX_PARALLEL}")
    if not 0 <= mask_token_id < vocab_size:
        raise refuse(folder, "mask_token_id", mask_token_id, f"ids below {vocab_size}")


def check_fits(folder: Path, **pairs: tuple[int, int]) -> None:
    """Compares (of the head, of the target) by name. Raises: ConfigError that names all that differ."""
    wrong = [
        f"{name} {head} of the head, {target} of the target" for name, (head, target) in pairs.items() if head != target
    ]
    if wrong:
        raise ConfigError(f"head {folder} was made for another target: {'; '.join(wrong)}")
