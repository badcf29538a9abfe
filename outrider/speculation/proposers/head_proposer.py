"""READ FIRST: makes a proposer from a head, in a decode node or in a draft node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import GrammarCompiler
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.memory import KVMemory
from outrider.heads.packed_head import PackedHead
from outrider.model_hub.checkpoint_text import open_text, vocabulary_fingerprint
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, resolve_device, start_kernels
from outrider.model_hub.loaded_model import LoadedModel, grammar_compiler, known_token_ids
from outrider.model_hub.locate import locate_model
from outrider.progress import Progress, no_progress
from outrider.speculation.proposers.base import ProposerInfo
from outrider.speculation.proposers.draft_forward import open_rollouts
from outrider.speculation.proposers.draft_model import CATCH_UP_SECONDS, MAX_CATCH_UP_ROWS, DraftModelProposer
from outrider.speculation.proposers.head_forward import HeadForward
from outrider.speculation.proposers.native_head import NativeHeadSteps

if TYPE_CHECKING:
    from outrider.heads.base import HeadModel

MEMORY_SHARE = 0.03
"""Fraction of free memory for a head's KV cache. It is small, because a head has few layers and its target dozens."""

MIN_CACHED_TOKENS, MAX_CACHED_TOKENS = 1 << 12, 1 << 20
"""Bounds of a head's KV cache, in tokens of all sequences. A sequence that does not fit gets no drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTarget:
    """The properties of a target that its head's proposer needs."""

    directory: Path
    device: str  # a torch device name
    dtype: str  # dtype of the target's features
    known_token_ids: npt.NDArray[np.bool_]  # [vocab_size]
    constraints: GrammarCompiler  # a compiler for the target's vocabulary
    vocabulary_fingerprint: str
    kernels: CpuKernels | None  # for sampler and attention on a CPU; None: torch computes them
    cuda_graphs: bool = True  # whether forwards may be captured
    num_threads: int = 0  # threads of a head that torch computes; 0: torch's current number

    @classmethod
    def of(cls, model: LoadedModel, *, cuda_graphs: bool = True) -> HeadTarget:
        """Returns the properties of a model in this process."""
        return cls(
            directory=model.directory,
            device=model.device,
            dtype=model.spec.dtype,
            known_token_ids=model.known_token_ids,
            constraints=model.constraints,
            vocabulary_fingerprint=model.info.vocabulary_fingerprint,
            kernels=model.cpu_kernels,
            cuda_graphs=cuda_graphs,
            num_threads=model.num_threads if model.model is None else 0,
        )

    @classmethod
    def locate(cls, config: ModelConfig, *, progress: Progress = no_progress) -> HeadTarget:
        """Returns the properties of a model that other nodes run. Raises: ConfigError; the errors of `locate_model`."""
        from outrider.heads.checkpoint import Target
        from outrider.model_hub.load import read_config, resolve_dtype  # imports transformers

        directory = locate_model(config, progress=progress).directory
        device = resolve_device(config.device)
        choice = choose_model_kernels(config, device, progress=progress)
        _, text = open_text(directory)
        known = known_token_ids(text.vocabulary, Target.open(directory).vocab_size)
        return cls(
            directory=directory,
            device=device,
            dtype=resolve_dtype(config.dtype, device, read_config(directory), is_native=choice.library is not None),
            known_token_ids=known,
            constraints=grammar_compiler(text, len(known)),
            vocabulary_fingerprint=vocabulary_fingerprint(text.own_vocabulary),
            kernels=None if choice.library is None else start_kernels(choice, config),
            cuda_graphs=config.cuda_graphs,
            num_threads=config.num_threads,
        )


def load_head(folder: Path | str, target: HeadTarget) -> HeadModel:
    """Loads the head in this folder. On a CPU, torch computes it in float32, as torch's bfloat16 is slow on few rows.

    Raises: ConfigError if the head was made for another target or is not supported; ModelError for damaged files.
    """
    import torch

    from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
    from outrider.heads.checkpoint import Checkpoint, Target
    from outrider.heads.open import opened

    checkpoint, device = Checkpoint.open(Path(folder)), torch.device(target.device)
    opening = opened(checkpoint, Target.open(target.directory), device, TORCH_DTYPES[target.dtype])
    with torch.inference_mode(), opening as (head, files):
        if device.type == "cpu" and (target.kernels is None or not head.suits_kernels):
            files.dtype = torch.float32
        head.load(files)
        return head


def open_head_forward(model: HeadModel | PackedHead, target: HeadTarget, *, num_cached_tokens: int) -> HeadForward:
    """Returns a head's warmed-up forwards. To be called in the thread that runs them.

    `num_cached_tokens`: see `HeadForward.of`.
    """
    forward = HeadForward.of(
        model,
        num_cached_tokens=num_cached_tokens,
        known_token_ids=target.known_token_ids,
        constraints=target.constraints,
        device=target.device,
        kernels=target.kernels,
    )
    if target.num_threads and not isinstance(forward.model, PackedHead):
        import torch

        torch.set_num_threads(target.num_threads)
    forward.warm_up()
    if not target.cuda_graphs or isinstance(forward.steps, NativeHeadSteps) or not forward.steps.can_be_captured:
        return forward
    forward.steps.capture_graphs()
    return replace(forward, rollouts=open_rollouts(forward, target.device))


def make_head_proposer(
    model: HeadModel | PackedHead,
    target: HeadTarget,
    *,
    max_catch_up_rows: int = MAX_CATCH_UP_ROWS,
    catch_up_seconds: float = CATCH_UP_SECONDS,
) -> DraftModelProposer:
    """Returns a proposer with this head. To be called in the thread that owns the proposer."""
    spec = model.spec
    token_bytes = sum(plane.bytes_per_token for plane in spec.planes)
    num_cached_tokens = 0
    if token_bytes:
        affordable = int(MEMORY_SHARE * KVMemory.of(target.device).free_bytes) // token_bytes
        num_cached_tokens = min(max(affordable, MIN_CACHED_TOKENS), MAX_CACHED_TOKENS)
    forward = open_head_forward(model, target, num_cached_tokens=num_cached_tokens)
    info = ProposerInfo(
        name=f"{spec.form}:{spec.name}",
        vocabulary_fingerprint=target.vocabulary_fingerprint,
        features=model.reduction.format(target.dtype),
        memory_bytes=num_cached_tokens * token_bytes,
        description={"dtype": spec.dtype, "fingerprint": spec.fingerprint, "device": target.device},
    )
    return DraftModelProposer(forward, info, max_catch_up_rows=max_catch_up_rows, catch_up_seconds=catch_up_seconds)
