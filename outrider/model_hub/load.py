"""Loads a model's weights into memory and checks that the model can be served."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, register_attention
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_options import HEAD_DIM_STEP, DecoderOptions, decoder_options
from outrider.engine.cpu_kernels.modules import NativeLayers
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.engine.cpu_kernels.paths import FUSED, KernelChoice
from outrider.engine.device import device_type
from outrider.engine.gpu_kernels import why_not_fused
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.engine.latent_attention import TorchProjections, absorb_projections
from outrider.engine.model_spec import ModelSpec
from outrider.engine.numerics import BatchInvariance, Numerics, native_numerics, torch_batch_invariance, torch_numerics
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import ConfigError, ModelError
from outrider.model_hub.checkpoint import Checkpoint, open_checkpoint
from outrider.model_hub.config import DEQUANTIZED, ModelConfig
from outrider.model_hub.expert_parallel import check_divided, own_division
from outrider.model_hub.fingerprint import check_weight_files
from outrider.model_hub.kernels import (
    check_deterministic,
    choose_attention,
    choose_model_kernels,
    fall_back_to_torch,
    resolve_device,
    start_kernels,
)
from outrider.model_hub.layerwise_reference import layerwise_logits, load_tensors, own_rotations
from outrider.model_hub.lazy_tensors import Tensors, dequantised
from outrider.model_hub.loaded_model import LoadedModel, describe_model
from outrider.model_hub.locate import ModelLocation, locate_model
from outrider.model_hub.plain_tensors import open_plain, tensors_of
from outrider.model_hub.support import (
    SPLIT_CONTEXT,
    architecture_name,
    check_config,
    check_paged_forward,
    depends_on_batch,
    describe_decoder,
    own_logits,
    probe_token_ids,
)
from outrider.model_hub.tensor_parallel import check_split, device_of_rank
from outrider.model_hub.weight_format import WeightFormat, choose_weight_format
from outrider.model_hub.window import Window, fix_rotations, resolve_window
from outrider.progress import Progress, no_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A model that is to be loaded: its files, and how it will be computed."""

    config: ModelConfig
    location: ModelLocation
    hf_config: PretrainedConfig
    checkpoint: Checkpoint | None  # None: its weights are plain, or transformers' quantizers read them
    tensors: Tensors | None  # None: transformers reads the weights
    device: str
    window: Window
    kernels: KernelChoice
    dtype: str
    options: DecoderOptions | None  # None: the native decoder does not compute the model
    weights: WeightFormat
    progress: Progress


def load_model(config: ModelConfig, *, progress: Progress = no_progress) -> LoadedModel:
    """Finds, loads and checks the model of `config`.

    A rank must have joined the others. Sets torch's number of threads: to the configured number, or to one if torch
    computes little besides native layers.

    Raises: ModelError if weights, tokenizer or architecture cannot be served, ConfigError if settings do not fit this
    machine, NotFoundError if the model does not exist.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    location = locate_model(config, progress=progress)
    state = check_weight_files(location.directory)
    source = _open_source(config, location, progress)
    source, runnable = _load_modules(source) if source.options is None else _load_packed(source, source.options)
    loaded = describe_model(
        config,
        location,
        source.kernels,
        runnable,
        weights=source.weights,
        numerics=_numerics(source, runnable),
        weights_source="checkpoint",
    )
    if check_weight_files(location.directory) != state:  # the fingerprint may belong to other weights
        raise ModelError(f"{location.directory} changed while it was loaded: start again")
    return loaded


def _open_source(config: ModelConfig, location: ModelLocation, progress: Progress) -> _Source:
    """Chooses how to compute the model, by its configuration. Raises: as `load_model`."""
    device = resolve_device(config.device) if config.num_ranks == 1 else device_of_rank(config, dist.get_rank())
    hf_config = read_config(location.directory)
    check_config(hf_config, device)
    checkpoint = open_checkpoint(location.directory, device)
    if checkpoint is not None and (num_ranks := config.tensor_parallel_size) > 1:
        raise ConfigError(f"model.tensor_parallel_size is {num_ranks}, but {checkpoint.format} cannot be divided")
    text_config = hf_config.get_text_config(decoder=True)
    window = resolve_window(text_config, config.max_model_len)
    if window.is_extended:
        fix_rotations(text_config)
    kernels = choose_model_kernels(config, device, progress=progress)
    if kernels.path == FUSED and (reason := why_not_fused(hf_config)):
        kernels = fall_back_to_torch(config, reason)
    is_native = kernels.library is not None
    found = decoder_options(hf_config.to_dict())
    options = found if is_native and isinstance(found, DecoderOptions) else None
    if is_native and isinstance(found, str):
        kernels = replace(kernels, reason=f"by layers: {found}")
    is_decoder = options is not None
    stays_packed = is_decoder and checkpoint is not None and checkpoint.is_quantised and config.weights != DEQUANTIZED
    dtype = resolve_dtype(config.dtype, device, hf_config, is_native=is_native, is_quantised=stays_packed)
    tensors = checkpoint.tensors if checkpoint is not None else None
    if tensors is None and options is not None:
        tensors = open_plain(location.directory, is_tied=options.is_tied)
    return _Source(
        config=config,
        location=location,
        hf_config=hf_config,
        checkpoint=checkpoint,
        tensors=tensors,
        device=device,
        window=window,
        kernels=kernels,
        dtype=dtype,
        options=options,
        weights=choose_weight_format(config, checkpoint, kernels, dtype=dtype, is_decoder=is_decoder),
        progress=progress,
    )


def _load_packed(source: _Source, options: DecoderOptions) -> tuple[_Source, RunnableModel]:
    """Packs the tensors of the checkpoint, one at a time, and compares the logits with those of transformers."""
    tensors, window = source.tensors, source.window
    assert tensors is not None
    spec = options.spec(dtype=source.dtype, max_model_len=window.max_model_len, is_extended=window.is_extended)
    started = start_kernels(source.kernels, source.config)
    quantise = source.weights.rounded_to
    is_plain = source.checkpoint is None  # then there may be other modules, such as a value head or MTP layers
    logits = partial(layerwise_logits, source.hf_config, tensors, quantise=quantise, may_have_others=is_plain)
    # First, because it checks the tensors' names and shapes.
    expected = logits(dtype=TORCH_DTYPES[spec.dtype], progress=source.progress)
    options = own_rotations(source.hf_config, options)
    packed = tensors if source.weights.has_int8_activations else dequantised(tensors)
    weights = pack_weights(started, options, spec, packed, quantise=quantise)
    runnable = RunnableModel(model=None, native=NativeDecoder(started, weights), device=source.device, spec=spec)
    check_paged_forward(runnable, expected, exact=logits, is_lossy=source.weights.has_int8_activations)
    return source, runnable


def _load_modules(source: _Source) -> tuple[_Source, RunnableModel]:
    """Loads the model with transformers, replaces what our kernels compute, and compares the logits.

    Returns the source with the kernels and the dtype that are used after all.
    """
    config, device = source.config, source.device
    model = _load_weights(source)
    spec, layers = describe_decoder(model, dtype=source.dtype, window=source.window)
    if config.tensor_parallel_size > 1:
        check_split(spec, source.hf_config, config.tensor_parallel_size)
    odd = [plane.head_dim for plane in spec.planes if plane.is_attended and plane.head_dim % HEAD_DIM_STEP]
    if source.kernels.library is not None and odd:
        reason = f"its heads have {odd[0]} dimensions, not a multiple of {HEAD_DIM_STEP}"
        kernels = fall_back_to_torch(config, reason)
        dtype = resolve_dtype(config.dtype, device, source.hf_config, is_native=False)
        weights = choose_weight_format(config, source.checkpoint, kernels, dtype=dtype, is_decoder=False)
        source = replace(source, kernels=kernels, dtype=dtype, weights=weights)
        nn.Module.to(model, TORCH_DTYPES[dtype])  # in place
        spec = replace(spec, dtype=dtype)
    if spec.linear is not None and source.kernels.library is None:
        raise ModelError(f"{spec.architecture} has linear attention, which only native kernels compute")
    check_deterministic(config, device, source.kernels)
    quantise = source.weights.rounded_to
    if quantise:
        # A name for the tensors would keep them alive while their layers are packed.
        expected = layerwise_logits(
            source.hf_config, tensors_of(model), dtype=TORCH_DTYPES[source.dtype], quantise=quantise
        )
    else:
        expected = own_logits(model, probe_token_ids(spec.vocab_size))
    runnable = _make_runnable(source, model, spec, layers)

    def exact() -> Tensor:
        if source.tensors is None and getattr(source.hf_config, "quantization_config", None):
            return expected  # transformers' quantizers do not compute in float32
        own = replace(source, hf_config=copy.deepcopy(source.hf_config), device="cpu")
        own = replace(own, config=replace(config, tensor_parallel_size=1))
        tensors = source.tensors if source.tensors is not None else tensors_of(_load_weights(own))
        return layerwise_logits(source.hf_config, tensors, quantise=quantise)

    is_lossy = source.weights.has_int8_activations
    try:
        check_paged_forward(runnable, expected, exact=exact, is_lossy=is_lossy)
    except ModelError as error:
        if runnable.fused is None:
            raise
        source = replace(source, kernels=fall_back_to_torch(config, str(error)))
        runnable = _make_runnable(source, model, spec, layers)
        check_paged_forward(runnable, expected, exact=exact)
    return source, runnable


def _numerics(source: _Source, model: RunnableModel) -> Numerics:
    """Returns the numerics.

    They are exact unless torch computes the model without `model.deterministic`, or parts of it depended on the batch
    in a test.
    """
    config, dtype = source.config, model.spec.dtype
    if model.native is not None:
        by_layers = isinstance(model.native, NativeLayers)
        # torch computes Conv1D, experts of unknown forms and everything else that is none of our layers.
        depends = by_layers and depends_on_batch(model)
        return native_numerics(
            source.kernels.arithmetic,
            by_layers=by_layers,
            weights=source.weights.numerics_note,
            batch_invariance=torch_batch_invariance(dtype) if depends else BatchInvariance.EXACT,
        )
    if not config.deterministic:
        return torch_numerics(dtype, device_type(model.device), num_ranks=config.tensor_parallel_size)
    from outrider.engine.deterministic_layers import deterministic_kernels

    attention = choose_attention(config, model.device)
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(model.device))
    depends = depends_on_batch(model, attention, num_tokens=SPLIT_CONTEXT)
    arithmetic = deterministic_kernels(dtype, capability) + ", fused" * (model.fused is not None)
    return Numerics(torch_batch_invariance(dtype) if depends else BatchInvariance.EXACT, arithmetic)


def _make_runnable(
    source: _Source, model: PreTrainedModel, spec: ModelSpec, layers: Sequence[AttentionOptions]
) -> RunnableModel:
    """Returns the model with native layers or fused kernels, or torch's model.

    `model` itself can still be used if kernels are fused, or are torch's without `model.deterministic`.
    """
    config, kernels, division = source.config, source.kernels, own_division(source.config)
    runnable = RunnableModel(model=model, native=None, device=source.device, spec=spec)
    if kernels.path == FUSED:
        from outrider.engine.fused_decoder import FusedDecoder  # imports triton

        return replace(runnable, fused=FusedDecoder(model, spec, layers, is_deterministic=config.deterministic))
    if kernels.library is not None:
        native = NativeLayers(start_kernels(kernels, config), quantise=source.weights.rounded_to)
        native.replace_in(model, division)
        torch.set_num_threads(1)  # torch's remaining work is light, and its rounding depends on how threads divide it
        runnable = replace(runnable, native=native)
    else:
        absorb_projections(model, TorchProjections)
        if config.deterministic:
            from outrider.engine.deterministic_layers import make_deterministic  # imports triton

            make_deterministic(model, division)
    if division is not None:
        check_divided(model, spec, str(kernels))
    return runnable


def resolve_dtype(
    name: str, device: str, config: PretrainedConfig, *, is_native: bool, is_quantised: bool = False
) -> str:
    """Returns the dtype of KV, activations and weights that are not quantised.

    "auto" is the checkpoint's own dtype, but float32 on a CPU without native kernels, because torch's bfloat16 kernels
    make decisions depend on the rest of the batch.
    """
    if name != "auto":
        return name
    checkpoint = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    if device_type(device) == "cpu":
        if is_native and is_quantised:
            return "bfloat16"  # activations are rounded to int8 anyway
        if not is_native or checkpoint == "float16":  # bfloat16 would lose precision of the checkpoint
            return "float32"
    return checkpoint if checkpoint in TORCH_DTYPES else "bfloat16"


def read_config(directory: Path) -> PretrainedConfig:
    """Reads a checkpoint's config.json. Raises: ModelError if it is invalid."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # architectures may raise anything
        raise ModelError(f"{directory / 'config.json'} cannot be read: {type(error).__name__}: {error}") from error
    return config


def _load_weights(source: _Source) -> PreTrainedModel:
    """Loads the weights, or with several ranks this rank's shard, by transformers' plan.

    Weights for fused kernels are loaded to the CPU, and moved to the device one by one. Otherwise transformers
    allocates one piece of device memory for all weights, and weights that are joined later leave holes in it.
    """
    register_attention()
    config, directory, dtype = source.hf_config, source.location.directory, TORCH_DTYPES[source.dtype]
    device, progress, num_ranks = source.device, source.progress, source.config.tensor_parallel_size
    if source.tensors is not None:
        model = load_tensors(config, source.tensors, dtype=dtype, attention=ATTENTION_NAME, progress=progress)
        nn.Module.to(model, device)  # in place
        return model
    moves_one_by_one = source.kernels.path == FUSED
    at_first = "cpu" if moves_one_by_one or source.config.expert_parallel_size > 1 else device
    placement: dict[str, Any] = {"device_map": {"": at_first} if device_type(at_first) != "cpu" else None}
    if num_ranks > 1:
        placement = {"distributed_config": DistributedConfig(tp_size=num_ranks)}
    with _reported_progress(progress):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                **placement,
            )
        except Exception as error:  # architectures may raise anything
            why = f"{type(error).__name__}: {error}"
            if "ignore_mismatched_sizes" in why:  # the message refers to a report that is not shown
                why = "its weights have other shapes than its config.json says"
            raise ModelError(f"{architecture_name(config)} cannot be loaded from {directory}: {why}") from error
    model = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers initialises them
        raise ModelError(f"{directory} has no weights for {len(missing)} tensors of the model, such as {missing[0]}")
    model.requires_grad_(requires_grad=False)
    if moves_one_by_one:
        nn.Module.to(model, device)  # in place
    return model.eval()


@contextlib.contextmanager
def _reported_progress(progress: Progress) -> Iterator[None]:
    """Redirects transformers' progress bars to `progress`; the hook is global, so it is restored afterwards."""

    class Bar(tqdm):
        """A bar that draws nothing."""

        monitor_interval = 0

        def display(self, *_arguments: Any, **_keywords: Any) -> None:
            progress("weights", self.n, int(self.total or 0))

    def hook(_factory: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Bar:
        own = {"disable": False, "mininterval": 0.0, "miniters": 1, "file": io.StringIO()}
        return Bar(*arguments, **{**keywords, **own})

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
