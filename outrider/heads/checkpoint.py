"""Checkpoints of heads, and the parts of their targets' checkpoints that heads need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.features import FeatureReduction
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.fingerprint import weight_files
from outrider.model_hub.window import MAX_WINDOW


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with config.json and safetensors files, which are mapped, so that unread tensors take no memory."""

    folder: Path
    config: Mapping[str, Any]
    config_json: bytes = field(repr=False)  # the content of config.json
    _tensors: Mapping[str, Callable[[], Tensor]] = field(repr=False)  # by name

    @classmethod
    def open(cls, folder: Path, weights: Iterable[Path] | None = None) -> Checkpoint:
        """Opens a folder. `weights`: the files to read; None: all. Raises: ModelError for a missing or damaged file."""
        folder = folder.absolute()  # "." has no name. Links are not resolved: they may later point to another head.
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} has no config.json")
        tensors: dict[str, Callable[[], Tensor]] = {}
        for path in sorted(folder.glob("*.safetensors")) if weights is None else weights:
            try:
                file = safe_open(path, framework="pt")
                names = file.keys()  # type: ignore[no-untyped-call]
                tensors.update({name: partial(file.get_tensor, name) for name in names})
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
        return cls(folder, read_json(folder / "config.json"), (folder / "config.json").read_bytes(), tensors)

    @classmethod
    def in_memory(cls, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Checkpoint:
        """Makes the checkpoint of a folder that is not written yet."""
        own = {name: tensor.detach for name, tensor in tensors.items()}
        return cls(folder, config, json.dumps(config).encode(), own)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def mapped(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns a tensor in its file's mapped memory. Raises: ModelError if it is missing or has another shape."""
        if name not in self._tensors:
            other = "" if self._tensors else ": weights are read from *.safetensors only; convert other files"
            raise ModelError(f"{self.folder} has no tensor {name}{other}")
        tensor = self._tensors[name]()
        if shape is not None and tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {tuple(tensor.shape)}, not {shape}")
        return tensor


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a head drafts for. Only tensors that heads share with it are read."""

    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> Target:
        """Opens the model's folder. Raises: ModelError."""
        return cls(Checkpoint.open(folder, (path for path in weight_files(folder) if path.suffix == ".safetensors")))

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the text model, which is a part of config.json if the checkpoint has several models."""
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
        """The model's window in tokens, at most `MAX_WINDOW`."""
        return min(int(self.config["max_position_embeddings"]), MAX_WINDOW)

    def last_hidden_state(self) -> FeatureReduction:
        """Returns the reduction for heads that have the same input as the target's output layer."""
        return FeatureReduction(taps=(self.num_layers,), hidden_size=self.hidden_size, takes_final_norm=True)

    def embedding(self) -> Tensor:
        """Returns [vocab_size, hidden_size]. Raises: ModelError if the checkpoint has it under no known name."""
        names = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
        for name in names:
            if name in self.checkpoint.tensor_names:
                return self.checkpoint.mapped(name)
        raise ModelError(f"{self.checkpoint.folder} has no tensor {' or '.join(names)}")

    def output_layer(self) -> Tensor:
        """Returns [vocab_size, hidden_size]: the embedding if the two are tied. Raises: what `embedding` raises."""
        if "lm_head.weight" in self.checkpoint.tensor_names:
            return self.checkpoint.mapped("lm_head.weight")
        return self.embedding()
