"""Packs the default model's bfloat16 head, which is part of this package, for native kernels, without torch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from outrider.engine.cpu_kernels.decoder_options import DecoderOptions, decoder_options
from outrider.engine.cpu_kernels.decoder_weights import DecoderWeights, PackedReduction
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import ElementType
from outrider.engine.cpu_kernels.matrices import PlainLinear, to_float32
from outrider.engine.cpu_kernels.packing import DecoderPacking
from outrider.heads.packed_head import PackedHead
from outrider.heads.spec import HeadSpec
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.safetensors_files import SafetensorsFiles

_LAYER = "layers.0."
_READ = (
    *("fc.weight", "d2t", f"{_LAYER}hidden_norm.weight", f"{_LAYER}input_layernorm.weight"),
    *(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    f"{_LAYER}post_attention_layernorm.weight",
    *(f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("norm.weight", "lm_head.weight"),
)
"""Tensors in the order in which `forms.eagle3` reads them. The head's fingerprint depends on this order."""


def pack_default_head(folder: Path, target: Path, kernels: CpuKernels, max_model_len: int) -> PackedHead:
    """Packs the default model's head as `Eagle3.pack` would. `target`: the folder of the default model."""
    about, tensors = read_json(folder / "config.json"), SafetensorsFiles(folder)
    layer = about["transformer_layer_config"]
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in _READ:
        digest.update(name.encode())
        digest.update(tensors[name].data)
    packing = DecoderPacking(kernels, quantise="int8")
    packing.add_layer(0, tensors, _LAYER)
    options = decoder_options(layer)
    assert isinstance(options, DecoderOptions), options
    packing.add_rotation(options.rotations[0].frequencies, max_model_len)
    packing.add("embedding", SafetensorsFiles(target)["model.embed_tokens.weight"])
    packing.add_norm("feature_norm", tensors[f"{_LAYER}hidden_norm.weight"])
    packing.add_norm("final_norm", tensors["norm.weight"])
    packing.add_matrix("head", [PlainLinear(tensors["lm_head.weight"])])
    packing.add("target_ids", tensors["d2t"] + np.arange(about["draft_vocab_size"]))
    shape = replace(options.shape, element_type=ElementType.BFLOAT16, matrix_sizes=packing.matrix_sizes)
    spec = HeadSpec(
        form=about["speculators_model_type"],
        name=folder.name,
        fingerprint=digest.hexdigest(),
        vocab_size=layer["vocab_size"],
        max_model_len=max_model_len,
        dtype="bfloat16",
        num_layers=1,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        width=shape.hidden_size,
    )
    projection = DecoderPacking(kernels)
    projection.add_matrix("reduction.projection", [PlainLinear(tensors["fc.weight"])])
    reduction = PackedReduction(
        taps=tuple(about["eagle_aux_hidden_state_layer_ids"]),
        hidden_size=shape.hidden_size,
        epsilon=shape.epsilon,
        width=shape.hidden_size,
        element_type=ElementType.BFLOAT16,
        blobs=projection.blobs,
    )
    fingerprint = reduction.fingerprint_of({"projection": to_float32(tensors["fc.weight"])})
    return PackedHead(spec, replace(reduction, fingerprint=fingerprint), DecoderWeights(shape, packing.blobs))
