"""READ FIRST: how a node gets its model. From packed weights where there are any, else from the checkpoint.

Packed weights are mapped: no torch, no transformers, no packing, no check, and nodes of one machine
share them. A node that finds none loads the checkpoint as outrider.model_hub.load does,
and leaves them for the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_weights import MODEL_TYPES
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.errors import ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import choose_model_kernels, resolve_device, start_kernels
from outrider.model_hub.loaded_model import LoadedModel, describe_model
from outrider.model_hub.locate import cache_directory, locate_model
from outrider.model_hub.packed_weights import PackedKey, PackedModel, read_packed, write_packed
from outrider.model_hub.progress import Progress, no_progress
from outrider.model_hub.vocabulary import read_json

WAIT_REPORT_SECONDS = 1.0
WAIT_SECONDS = 1800.0
"""For another process that packs the same model; a killed one is not waited for."""


def open_model(config: ModelConfig, *, progress: Progress = no_progress) -> LoadedModel:
    """The model of `config`, ready to run. Raises what outrider.model_hub.load.load_model does.

    Any number of processes may call it at once: one packs, the others wait for it and
    report stage "wait". A cache that cannot be used costs time and memory, nothing else;
    `LoadedModel.weights_from` says why.
    """
    location = locate_model(config, progress=progress)
    device = resolve_device(config.device)
    kernels = choose_model_kernels(config, device, progress=progress)
    is_decoder = read_json(location.directory / "config.json").get("model_type") in MODEL_TYPES
    if kernels.library is None or not is_decoder or not config.keep_packed:
        return _load(config, progress)
    try:
        key = PackedKey.of(config, location.directory, kernels)
    except (ModelError, OSError):
        return _load(config, progress)  # which says what is wrong with the checkpoint

    def run(packed: PackedModel, started: CpuKernels) -> LoadedModel:
        return describe_model(
            config=config,
            location=location,
            kernels=kernels,
            device=device,
            spec=packed.spec,
            model=None,
            native=NativeDecoder(started, packed.weights),
            weights_from="packed weights, mapped",
        )

    cache = cache_directory(config) / "packed"
    folder = cache / key.folder_name
    if (packed := read_packed(folder, progress=progress)) is not None:
        return run(packed, start_kernels(kernels, config))
    with contextlib.ExitStack() as stack:
        problem = _lock(stack, cache, key, progress)
        if not problem and (packed := read_packed(folder, progress=progress)) is not None:
            return run(packed, start_kernels(kernels, config))
        loaded = _load(config, progress)
        if not isinstance(loaded.native, NativeDecoder):
            return loaded
        started = loaded.native.kernels
        if not problem:
            problem = _write(cache, key, PackedModel(loaded.spec, loaded.native.weights))
        packed = None if problem else read_packed(folder)
        if packed is None:
            reason = problem or f"what was written to {folder} cannot be read back"
            return dataclasses.replace(loaded, weights_from=f"checkpoint; packed weights are not kept: {reason}")
        return run(packed, started)


def _load(config: ModelConfig, progress: Progress) -> LoadedModel:
    from outrider.model_hub.load import load_model  # imports transformers

    return load_model(config, progress=progress)


def _lock(stack: contextlib.ExitStack, cache: Path, key: PackedKey, progress: Progress) -> str:
    """Enters the lock of this model's packed weights; returns why not, or nothing."""
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{key.model}.lock")
        while True:
            try:
                lock.acquire(timeout=WAIT_REPORT_SECONDS)
                break
            except Timeout:
                progress("wait", 0, 0)
            if time.monotonic() > deadline:
                return f"another process has been packing them for {WAIT_SECONDS / 60:.0f} minutes"
    except OSError as error:
        return str(error)
    stack.callback(lock.release)
    return ""


def _write(cache: Path, key: PackedKey, packed: PackedModel) -> str:
    """Returns why not, or nothing."""
    try:
        write_packed(cache, key, packed)
    except OSError as error:
        return str(error)
    return ""
