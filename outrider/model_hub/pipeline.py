"""Checks that the layers of a model can be divided into stages, and opens the part of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.device import device_type
from outrider.engine.feature_writer import layers_of
from outrider.engine.moved_kv import can_be_moved
from outrider.engine.numerics import torch_numerics
from outrider.engine.stages import Stage
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.loaded_model import LoadedModel
from outrider.model_hub.locate import locate_model
from outrider.model_hub.open import open_model
from outrider.model_hub.tensor_parallel import check_division, device_of_rank
from outrider.progress import Progress, no_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_pipeline(config: ModelConfig, directory: Path) -> None:
    """Raises ConfigError if `pipeline_parallel_size` does not fit the other settings, the model or the machine."""
    fields = read_json(directory / "config.json")
    text = fields.get("text_config", fields)
    num_layers = text.get("num_hidden_layers", text.get("n_layer"))
    is_known = isinstance(num_layers, int)
    refusals = [
        (not is_known, "needs to know the number of layers, which the model's config.json does not state"),
        (is_known and num_layers < config.num_ranks, f"is more than the model's {num_layers} layers"),
        (text.get("linear_num_value_heads"), "does not go with linear attention, which the model has"),
    ]
    on_gpus = [
        (config.deterministic, "does not go with model.deterministic on a GPU"),
        (fields.get("quantization_config"), "does not go with a quantised checkpoint on a GPU"),
    ]
    check_division(config, "pipeline_parallel_size", refusals, on_gpus=on_gpus)


def open_stage(config: ModelConfig, rank: int, *, progress: Progress = no_progress) -> LoadedModel:
    """Opens the model in this process and keeps the layers of this rank's stage, which the result's `spec` counts.

    Packed weights are mapped, so only those of the stage are read. Otherwise the process loads the whole model before
    it frees the other layers; for a GPU, in main memory. Raises: what `open_model` raises.
    """
    device = device_of_rank(config, rank)
    alone = replace(config, pipeline_parallel_size=1)
    if device_type(device) != "cpu":
        from outrider.model_hub.load import read_config, resolve_dtype  # imports transformers

        files = locate_model(config, progress=progress).directory
        dtype = resolve_dtype(config.dtype, device, read_config(files), is_native=False)
        alone = replace(alone, device="cpu", kernels="torch", dtype=dtype)
    model = open_model(alone, progress=progress)
    stage = Stage.of_rank(rank, config.pipeline_parallel_size, model.spec.num_layers)
    if isinstance(model.native, NativeDecoder):
        model = replace(model, native=model.native.of_layers(stage.layers))
    else:
        assert model.model is not None
        _keep_layers(model.model, stage, model.spec.num_layers)
    if device_type(device) != "cpu":
        assert model.model is not None
        nn.Module.to(model.model, device)  # in place
        numerics = str(torch_numerics(model.spec.dtype, device_type(device)))
        model = replace(model, device=device, info=replace(model.info, numerics=numerics))
    model = replace(model, spec=model.spec.of_layers(stage.layers), stage=stage)
    return replace(model, info=replace(model.info, can_blend=can_be_moved(model)))


def _keep_layers(model: PreTrainedModel, stage: Stage, num_layers: int) -> None:
    """Removes the layers of other stages, and the output layer unless this is the last stage."""
    layers = layers_of(model.get_decoder(), num_layers)
    del layers[stage.layers.stop :]
    del layers[: stage.layers.start]
    text = model.config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):  # transformers looks up a layer's type by its place in the list
        text.layer_types = text.layer_types[stage.layers.start : stage.layers.stop]
    if not stage.is_last:
        model.set_output_embeddings(nn.Identity())
