"""A model in memory, ready to be run, with everything that its node tells others about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.engine.device import device_type
from outrider.engine.model_spec import ModelSpec
from outrider.engine.numerics import native_numerics, torch_numerics
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.sampler import Sampler
from outrider.model_hub.checkpoint_text import open_text
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.fingerprint import model_fingerprint
from outrider.model_hub.locate import ModelLocation, cache_directory
from outrider.model_hub.packed_weights import PackedKey
from outrider.model_hub.vocabulary import (
    grammar_compiler,
    known_token_ids,
    row_eos_token_ids,
    vocabulary_fingerprint,
)
from outrider.node import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.cpu_kernels.modules import NativeLayers
    from outrider.engine.feature_spec import FeatureSpec

INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(RunnableModel):
    """Made by outrider.model_hub.load or, from packed weights, by outrider.model_hub.open."""

    kernels: KernelChoice
    info: ModelInfo
    tokenizer_files: dict[str, bytes]  # by file name
    known_token_ids: npt.NDArray[np.bool_]  # [vocab_size]: ids that the tokenizer has
    constraints: GrammarCompiler  # for its vocabulary
    directory: Path
    weights_from: str  # for people: "checkpoint", or "packed weights, mapped"
    packed_key: PackedKey | None = None  # of its packed weights, where they are kept: a head's are kept beside them

    def with_features(self, features: FeatureSpec | None) -> LoadedModel:
        """The same, whose cache has a plane for features of this reduction, and which says so."""
        if features is None:
            return self
        dtype = self.spec.dtype
        return replace(
            self,
            spec=replace(self.spec, features=features.plane(dtype)),
            info=replace(self.info, features=features.format(dtype)),
        )

    def open_sampler(self) -> Sampler:
        """Over its logits, warmed up."""
        sampler = Sampler(
            vocab_size=self.info.vocab_size,
            known_token_ids=self.known_token_ids,
            device=self.device,
            kernels=self.cpu_kernels,
            constraints=self.constraints,
        )
        sampler.warm_up()
        return sampler

    @property
    def num_threads(self) -> int:
        """Of one forward pass."""
        if self.native is not None:
            return self.native.kernels.num_threads
        import torch

        return torch.get_num_threads()


ReductionOf = Callable[[LoadedModel], "FeatureSpec | None"]
"""The reduction of a model's head, which may have been packed for the kernels that compute the model."""


def describe_model(
    *,
    config: ModelConfig,
    location: ModelLocation,
    kernels: KernelChoice,
    device: str,
    spec: ModelSpec,
    model: PreTrainedModel | None,
    native: NativeDecoder | NativeLayers | None,
    weights_from: str,
    packed_key: PackedKey | None = None,
) -> LoadedModel:
    """Adds what the tokenizer and the other files of a checkpoint say. Raises ModelError for damaged ones."""
    directory = location.directory
    numerics = torch_numerics(spec.dtype, device_type(device), num_ranks=config.tensor_parallel_size)
    if native is not None:
        numerics = native_numerics(
            kernels.arithmetic, by_layers=model is not None, has_int8_weights=config.weights == INT8
        )
    # Rounded weights and activations, and other rotations, make another model, whose KV nobody else may use.
    arithmetic = ", ".join([spec.dtype, *["W8A8"] * (config.weights == INT8), *["extended window"] * spec.is_extended])
    tokenizer_files, text = open_text(directory)
    info = ModelInfo(
        name=location.name,
        revision=location.revision,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        eos_token_ids=row_eos_token_ids(text, spec.vocab_size),
        dtype=spec.dtype,
        fingerprint=model_fingerprint(directory, dtype=arithmetic, cache=cache_directory(config)),
        vocabulary_fingerprint=vocabulary_fingerprint(text.own_vocabulary),
        numerics=str(numerics),
    )
    return LoadedModel(
        model=model,
        native=native,
        kernels=kernels,
        device=device,
        spec=spec,
        info=info,
        tokenizer_files=tokenizer_files,
        known_token_ids=known_token_ids(text.vocabulary, spec.vocab_size),
        constraints=grammar_compiler(text, spec.vocab_size),
        directory=directory,
        weights_from=weights_from,
        packed_key=packed_key,
    )
