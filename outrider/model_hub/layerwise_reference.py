"""transformers' own logits of a checkpoint, computed layer by layer, so that memory holds the weights of one layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.engine.cpu_kernels.decoder_options import DecoderOptions
from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.cpu_kernels.matrices import rounded_weight
from outrider.engine.experts import EXPERT_WEIGHTS, are_experts, gate_of
from outrider.errors import ModelError
from outrider.model_hub.lazy_tensors import Tensors
from outrider.model_hub.support import architecture_name, probe_token_ids
from outrider.progress import Progress, no_progress

_UNUSED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Names of tensors in old checkpoints that transformers ignores, because it computes them."""

_ALLOWED = 2.5e-7
"""Allowed difference of frequencies in radians: two units in the last place of the largest."""

_Place: TypeAlias = tuple[nn.Module, str, str, nn.Parameter]
"""A module, a parameter's name in it, its name in the model, and the parameter itself on torch's meta device."""


def layerwise_logits(
    config: PretrainedConfig,
    tensors: Tensors,
    *,
    dtype: torch.dtype = torch.float32,
    quantise: str = "",
    may_have_others: bool = False,
    token_ids: Tensor | None = None,
    progress: Progress = no_progress,
) -> Tensor:
    """Runs transformers' model with eager attention on a CPU, whatever the format of its checkpoint.

    The weights of a decoder layer, of the embeddings and of the head are read just before they are used, and dropped
    after it. The logits have the bits of transformers' whole model with the same (dequantised) weights.

    Args:
        config: the model's configuration. Its `quantization_config` is ignored, because `tensors` are dequantised here.
        tensors: the weights by transformers' parameter names. A tied head may be absent.
        dtype: the type of weights and arithmetic. torch.bfloat16 shows the rounding of transformers itself.
        quantise: what plain linear layers are rounded to (see PackedMatrix), so that only the arithmetic differs from
            ours; "": they are not rounded.
        may_have_others: whether `tensors` may have some that the model has no place for.
        token_ids: [num_sequences, num_tokens] int64; None for `support.probe_token_ids`.
        progress: receives the stage "weights" with numbers of layers.

    Returns: [num_sequences, num_tokens, vocab_size] float32.

    Raises: ModelError that names a tensor that is missing, has a wrong shape or is not one of the model's.
    """
    model = _empty_model(config, dtype, "eager")
    read = _reader(model, tensors, quantise, may_have_others=may_have_others)
    units = _places(model)
    for done, (name, places) in enumerate(units.items()):
        report = partial(progress, "weights", done, len(units))
        _read_while_running(model.get_submodule(name), places, read, report)
    for name, value in model.state_dict().items():
        if not value.is_meta:  # a buffer
            value.copy_(read(name, value))
    if token_ids is None:
        token_ids = probe_token_ids(model.get_output_embeddings().weight.shape[0])
    with torch.inference_mode():
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    progress("weights", len(units), len(units))
    return logits.float()


def own_rotations(config: PretrainedConfig, options: DecoderOptions) -> DecoderOptions:
    """Returns the options with scaled rotations as transformers computes them.

    Raises: ModelError if other rotations differ from those of transformers.
    """
    rotary: Any = _empty_model(config, torch.float32, "eager").base_model.rotary_emb
    rotations = []
    for rotation in options.rotations:
        prefix = f"{rotation.layer_type}_" * bool(rotation.layer_type)
        frequencies = getattr(rotary, f"{prefix}inv_freq").float().numpy()
        scale = float(getattr(rotary, f"{prefix}attention_scaling"))
        if not rotation.is_scaled:
            ours = rotation.frequencies
            if scale != 1.0 or ours.shape != frequencies.shape or not np.allclose(ours, frequencies, 0, _ALLOWED):
                raise ModelError("the model's rotations differ from those of its configuration")
            frequencies = ours  # torch's powers may differ in the last place, and depend on the processor
        rotations.append(replace(rotation, frequencies=frequencies, scale=scale, is_scaled=False))
    return replace(options, rotations=tuple(rotations))


def load_tensors(
    config: PretrainedConfig,
    tensors: Tensors,
    *,
    dtype: torch.dtype,
    attention: str,
    progress: Progress = no_progress,
) -> PreTrainedModel:
    """Makes transformers' model on the CPU with all weights, dequantised and rounded to `dtype`.

    `attention`: the name of its attention implementation. Raises: as `layerwise_logits`.
    """
    model = _empty_model(config, dtype, attention)
    read = _reader(model, tensors)
    tied: dict[str, str] = model.all_tied_weights_keys
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    for done, (name, value) in enumerate(state.items()):
        progress("weights", done, len(state))
        model.load_state_dict({name: read(name, value)}, strict=False, assign=True)
    model.tie_weights()
    progress("weights", len(state), len(state))
    return model.requires_grad_(requires_grad=False)


def _reader(
    model: PreTrainedModel, tensors: Tensors, quantise: str = "", *, may_have_others: bool = False
) -> Callable[[str, Tensor], Tensor]:
    """Returns read(name, like), which returns the tensor of a parameter in the dtype of `like`.

    Raises: ModelError if a tensor is missing, or is not one of the model's; `read` raises it for a wrong shape.
    """
    sources = _sources(model, tensors, may_have_others=may_have_others)
    rounded: dict[str, bool] = {}  # by tensor, including embeddings that are the head: whether outputs come last
    for path, module in model.named_modules() if quantise else ():
        if type(module) is nn.Linear:
            rounded[sources[f"{path}.weight"]] = False
        elif are_experts(module) and gate_of(module) is not None:
            rounded |= dict.fromkeys((sources[f"{path}.{name}"] for name in EXPERT_WEIGHTS), module.is_transposed)

    def read(name: str, like: Tensor) -> Tensor:
        source = sources[name]
        stored = tensors[source]
        if isinstance(stored, GroupedWeight):
            stored = stored.dequantise()
        elif source in rounded:
            rows = stored.swapaxes(-1, -2) if rounded[source] else stored
            rows = rounded_weight(rows.reshape(-1, rows.shape[-1]), quantise).reshape(rows.shape)
            stored = rows.swapaxes(-1, -2) if rounded[source] else rows
        if stored.shape != like.shape:
            raise ModelError(
                f"{architecture_name(model.config)}: {source} has the shape {list(stored.shape)}, but the "
                f"configuration needs {list(like.shape)}: config.json or the weights are another model's"
            )
        own = stored if stored.flags.writeable else stored.copy()  # a file's array cannot be a tensor's memory
        tensor = torch.from_numpy(own)
        return (tensor.view(torch.bfloat16) if own.dtype == np.uint16 else tensor).to(like.dtype)

    return read


def _empty_model(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Returns the model with parameters on torch's meta device and real buffers, which its constructor computes."""
    config = copy.deepcopy(config)
    for each in (config, config.get_text_config(decoder=True)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.requires_grad_(requires_grad=False).eval()


def _sources(model: PreTrainedModel, tensors: Tensors, *, may_have_others: bool) -> dict[str, str]:
    """Returns the tensor for each of the model's parameters and stored buffers. Of two tied ones, one may be absent.

    Biases of zeros, which AutoGPTQ writes for all linear layers, may be in excess: they change nothing.

    Raises: ModelError if a tensor is missing, or is not one of the model's.
    """
    tied: dict[str, str] = model.all_tied_weights_keys
    partners = {source: name for name, source in tied.items()} | tied
    sources = {name: name if name in tensors else partners.get(name, name) for name in model.state_dict()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 it has no public name
    unused = re.compile("|".join((*_UNUSED, *ignored)))
    missing = [name for name, source in sources.items() if source not in tensors]
    others = () if may_have_others else tensors
    extra = [name for name in others if name not in sources and not unused.search(name)]
    plain: Mapping[str, Any] = tensors  # biases are not quantised
    extra = [name for name in extra if not (name.endswith(".bias") and not np.any(plain[name]))]
    for names, problem in ((missing, "the weights lack"), (extra, "the model has no place for")):
        if names:
            raise ModelError(
                f"{architecture_name(model.config)}: {problem} {names[0]} ({len(names)} such tensors): config.json or "
                "the weights are another model's, or the weights are incomplete"
            )
    return sources


def _places(model: PreTrainedModel) -> dict[str, list[_Place]]:
    """Returns the places of parameters by the module that they are read for: a layer, or a module outside of layers."""
    layers = next((f"{name}." for name, each in model.named_modules() if isinstance(each, nn.ModuleList)), None)
    places: dict[str, list[_Place]] = {}
    for path, module in model.named_modules():
        layer = path.removeprefix(layers).split(".")[0] if layers and path.startswith(layers) else ""
        unit = f"{layers}{layer}" if layer else path
        for name, empty in module.named_parameters(recurse=False):
            places.setdefault(unit, []).append((module, name, f"{path}.{name}".lstrip("."), empty))
    return places


def _read_while_running(
    unit: nn.Module, places: list[_Place], read: Callable[[str, Tensor], Tensor], report: Callable[[], None]
) -> None:
    """Reads the parameters before each forward of the module and drops them after it."""

    def fill(_unit: nn.Module, _input: object) -> None:
        report()
        for module, name, full_name, empty in places:
            module.register_parameter(name, nn.Parameter(read(full_name, empty), requires_grad=False))

    def drop(_unit: nn.Module, _input: object, _output: object) -> None:
        for module, name, _, empty in places:
            module.register_parameter(name, empty)

    unit.register_forward_pre_hook(fill)
    unit.register_forward_hook(drop)
