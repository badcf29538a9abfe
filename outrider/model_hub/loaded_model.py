"""A model in memory, ready to run, with the information that its node publishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.engine.moved_kv import can_be_moved
from outrider.engine.numerics import Numerics
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.sampler import Sampler
from outrider.model_hub.checkpoint_text import CheckpointText, open_text, vocabulary_fingerprint
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.fingerprint import model_fingerprint
from outrider.model_hub.locate import ModelLocation, cache_directory
from outrider.model_hub.packed_weights import PackedKey
from outrider.model_hub.weight_format import WeightFormat
from outrider.node import ModelInfo

if TYPE_CHECKING:
    from outrider.engine.feature_spec import FeatureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(RunnableModel):
    """A loaded model, made by outrider.model_hub.load or, from packed weights, by outrider.model_hub.open."""

    kernels: KernelChoice
    info: ModelInfo
    tokenizer_files: dict[str, bytes]  # by file name
    known_token_ids: npt.NDArray[np.bool_]  # [vocab_size]: whether the tokenizer has the id
    constraints: GrammarCompiler  # for its vocabulary
    directory: Path
    weights_source: str  # shown to users: "checkpoint", or "packed weights, mapped"
    packed_key: PackedKey | None = None  # key of its packed weights, if they are cached; the head's key derives from it

    def with_features(self, features: FeatureSpec | None) -> LoadedModel:
        """Returns the model with a cache plane for this reduction's features, and with their format in `info`."""
        if features is None:
            return self
        dtype = self.spec.dtype
        return replace(
            self,
            spec=replace(self.spec, features=features.plane(dtype)),
            info=replace(self.info, features=features.format(dtype)),
        )

    def with_window(self, max_model_len: int) -> LoadedModel:
        """Returns the model with this maximum sequence length, in tokens, in its `spec` and `info`."""
        return replace(
            self,
            spec=replace(self.spec, max_model_len=max_model_len),
            info=replace(self.info, max_model_len=max_model_len),
        )

    def open_sampler(self) -> Sampler:
        """Opens a sampler for the model's logits and warms it up."""
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
        """Number of threads that compute one forward pass."""
        if self.native is not None:
            return self.native.kernels.num_threads
        import torch

        return torch.get_num_threads()


ReductionOf = Callable[[LoadedModel], "FeatureSpec | None"]
"""A function that returns the reduction of a model's head, possibly packed for the model's kernels."""


def describe_model(
    config: ModelConfig,
    location: ModelLocation,
    kernels: KernelChoice,
    model: RunnableModel,
    *,
    weights: WeightFormat,
    numerics: Numerics,
    weights_source: str,
    packed_key: PackedKey | None = None,
) -> LoadedModel:
    """Adds the information in the tokenizer and other files to the model. Raises: ModelError if a file is damaged."""
    directory, spec = location.directory, model.spec
    # Rounded weights and activations, or other rotations, make a different model, whose KV must not be shared.
    arithmetic = ", ".join(filter(None, (spec.dtype, weights.arithmetic, "extended window" * spec.is_extended)))
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
        weights=weights.name,
        can_blend=can_be_moved(model),
    )
    return LoadedModel(
        **{each.name: getattr(model, each.name) for each in fields(model)},
        kernels=kernels,
        info=info,
        tokenizer_files=tokenizer_files,
        known_token_ids=known_token_ids(text.vocabulary, spec.vocab_size),
        constraints=grammar_compiler(text, spec.vocab_size),
        directory=directory,
        weights_source=weights_source,
        packed_key=packed_key,
    )


def known_token_ids(strings: Mapping[int, str], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Returns which of a model's `vocab_size` rows have an entry in the vocabulary; the others are padding."""
    known = np.zeros(vocab_size, dtype=np.bool_)
    known[[token_id for token_id in strings if 0 <= token_id < vocab_size]] = True
    return known


def row_eos_token_ids(text: CheckpointText, vocab_size: int) -> tuple[int, ...]:
    """Returns the end-of-text ids that a model with this many rows can draw."""
    return tuple(token_id for token_id in text.eos_token_ids if token_id < vocab_size)


def grammar_compiler(text: CheckpointText, vocab_size: int) -> GrammarCompiler:
    """Makes a grammar compiler for logits of this width."""
    eos_token_ids = row_eos_token_ids(text, vocab_size)
    return GrammarCompiler(text.tokenizer_json, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
