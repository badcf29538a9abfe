"""READ FIRST: how a node gets its model: from packed weights if there are any, else from the checkpoint.

Packed weights are mapped, without torch, transformers, packing or checks, and nodes of one machine share them. If
there are none, the node starts a short process that packs the weights (`packed_weights.PACKER`). If that fails, the
node packs them itself and stores them for the next node. The default model is packed without torch (`default_packing`);
others are loaded with torch and transformers by outrider.model_hub.load.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_options import decoder_options
from outrider.engine.cpu_kernels.decoder_weights import DecoderShape, DecoderWeights
from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.engine.device import needs_torch
from outrider.engine.model_spec import ModelSpec
from outrider.engine.numerics import native_numerics
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import ConfigError, ModelError
from outrider.model_hub.checkpoint import open_checkpoint
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.default_packing import pack_default_model
from outrider.model_hub.kernels import choose_model_kernels, resolve_device, start_kernels
from outrider.model_hub.loaded_model import LoadedModel, describe_model
from outrider.model_hub.locate import locate_model
from outrider.model_hub.packed_weights import Packed, PackedKey, open_packed
from outrider.model_hub.weight_format import choose_weight_format
from outrider.progress import Progress, no_progress


def open_model(config: ModelConfig, *, progress: Progress = no_progress) -> LoadedModel:
    """Returns the model of `config`, ready to run. Raises: what outrider.model_hub.load.load_model raises.

    Any number of processes may call it concurrently, see `open_packed`. If packed weights could be used but are not,
    `LoadedModel.weights_source` gives the reason.
    """
    if config.num_ranks > 1:
        raise ConfigError(f"model.{config.parallel_setting}: only prefill and decode nodes divide models: set it to 1")
    location = locate_model(config, progress=progress)
    device = resolve_device(config.device)
    kernels = choose_model_kernels(config, device, progress=progress)
    is_decoder = not isinstance(decoder_options(read_json(location.directory / "config.json")), str)
    if kernels.library is None or not is_decoder or not config.keep_packed:
        return _load(config, kernels, progress)
    try:
        key = PackedKey.of(config, location.directory, kernels)
        checkpoint = open_checkpoint(location.directory, device)
    except (ModelError, OSError):
        return _load(config, kernels, progress)  # reports what is wrong with the checkpoint
    start = cache(lambda: start_kernels(kernels, config))  # one team of threads for packing and for serving
    loaded: list[LoadedModel] = []  # the model, if torch has loaded it

    def pack() -> Packed | None:
        made: tuple[ModelSpec, DecoderWeights] | None = None
        if config.id == DEFAULT_MODEL_ID:
            made = pack_default_model(location.directory, config, start())
        if made is None:
            loaded.append(_load(config, kernels, progress))
            native = loaded[0].native
            made = (loaded[0].spec, native.weights) if isinstance(native, NativeDecoder) else None
        if PackedKey.of(config, location.directory, kernels) != key:
            raise ModelError(f"{location.directory} changed while it was loaded: start again")
        if made is None:
            return None
        spec, weights = made
        return Packed({"spec": asdict(spec), "shape": asdict(weights.shape)}, weights.blobs)

    packed, problem = open_packed(key, pack, progress=progress)
    if packed is None:
        return loaded[0]
    team = loaded[0].cpu_kernels if loaded else None
    weights = DecoderWeights(DecoderShape.of_json(packed.about["shape"]), packed.blobs)
    native = NativeDecoder(team or start(), weights)
    about = packed.about["spec"]
    spec = ModelSpec(**about | {"windows": tuple(about["windows"]), "model_windows": ()})
    weight_format = choose_weight_format(config, checkpoint, kernels, dtype=spec.dtype, is_decoder=True)
    return describe_model(
        config,
        location,
        kernels,
        RunnableModel(model=None, native=native, device=device, spec=spec),
        weights=weight_format,
        numerics=native_numerics(kernels.arithmetic, weights=weight_format.numerics_note),
        weights_source=f"checkpoint; packed weights are not kept: {problem}" if problem else "packed weights, mapped",
        packed_key=key,
    )


def _load(config: ModelConfig, kernels: KernelChoice, progress: Progress) -> LoadedModel:
    """Loads the model with torch. Only the default model in bfloat16 on native kernels does not need this."""
    with needs_torch(f"model.id {config.id!r} (dtype {config.dtype}; {kernels})"):
        from outrider.model_hub.load import load_model
    return load_model(config, progress=progress)
