"""Opens the folder of a head: the whole head for torch, a packed head for native kernels, or only its reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.features import FeatureReduction
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.heads.base import HeadModel
from outrider.heads.checkpoint import Checkpoint, Target
from outrider.heads.forms import FORMS
from outrider.heads.head_files import HeadFiles
from outrider.heads.packed_head import PackedHead


def open_head(folder: Path, target: Target, device: torch.device, dtype: torch.dtype) -> HeadModel:
    """Opens the head of this folder.

    Raises: ConfigError if the head is for another target or not supported, ModelError for damaged files.
    """
    with opened(Checkpoint.open(folder), target, device, dtype) as (head, files):
        head.load(files)
        return head


def pack_head(folder: Path, target: Target, dtype: torch.dtype, kernels: CpuKernels) -> PackedHead | None:
    """Packs the head; if kernels cannot compute it, returns None without reading weights. Raises: as `open_head`."""
    with opened(Checkpoint.open(folder), target, torch.device("cpu"), dtype) as (head, files):
        if not head.suits_kernels:
            return None
        head.load(files)
        return head.pack(kernels)


def read_reduction(folder: Path, target: Target) -> FeatureReduction:
    """Reads only the reduction, which the target's nodes compute. Raises: as `open_head`."""
    with opened(Checkpoint.open(folder), target, torch.device("cpu"), torch.float32) as (head, _):
        return head.reduction


@contextmanager
def opened(
    checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[HeadModel, HeadFiles]]:
    """Yields a head whose weights are not loaded yet, and its files.

    Exceptions in the block that are not OutriderErrors, e.g. a library's for a missing field or a field of a wrong
    type, become ModelErrors.
    """
    files = HeadFiles(checkpoint, target, device, dtype)
    try:
        yield _form_of(files)(files), files
    except OutriderError:
        raise
    except Exception as error:
        raise ModelError(f"head {files.folder} cannot be opened, its config.json may be damaged: {error!r}") from error


def _form_of(files: HeadFiles) -> type[HeadModel]:
    """Returns the class for the form of head that the configuration describes. Raises: ConfigError if none matches."""
    config = files.config
    kind = config.get("speculators_model_type")
    for form in FORMS:
        if form.form == kind if "speculators_model_type" in config else form.is_form_of(config):
            return form
    names = ", ".join(form.form for form in FORMS)
    raise ConfigError(
        f"head {files.folder} has an unknown form ({kind or config.get('architectures')}); supported: {names}"
    )
