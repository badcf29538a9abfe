"""Packs a model of transformers for the native decoder."""

from __future__ import annotations

from outrider.engine.cpu_kernels.decoder_options import decoder_options
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.model_hub.layerwise_reference import own_rotations
from outrider.model_hub.plain_tensors import tensors_of


def pack_decoder(kernels, model, spec, *, quantise=""):
    options = own_rotations(model.config, decoder_options(model.config.to_dict()))
    return pack_weights(kernels, options, spec, tensors_of(model), quantise=quantise)
