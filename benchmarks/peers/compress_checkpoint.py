"""Writes a model in the format "compressed-tensors" that vLLM reads: linear layers with weights of 8 or 4 bits.

    python benchmarks/peers/compress_checkpoint.py MODEL TARGET --bits 8

Weights are rounded to the nearest value, without calibration. In 8 bits each row has a scale, and vLLM quantises
activations per token (W8A8). In 4 bits each group of 64 weights has a scale (W4A16; on processors with AMX, vLLM
quantises activations to 8 bits there, too). Embedding and head stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP_SIZE = 64
VALUES_PER_WORD = 8  # 4-bit values in an int32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory with config.json and model.safetensors")
    parser.add_argument("target", type=Path)
    parser.add_argument("--bits", type=int, choices=(8, 4), required=True)
    arguments = parser.parse_args()
    unfinished = arguments.target.with_name(arguments.target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(arguments.model, unfinished, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(arguments.model / "model.safetensors")
    save_file(compress(tensors, arguments.bits), unfinished / "model.safetensors", {"format": "pt"})
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(arguments.bits)
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(arguments.target)


def compress(tensors: dict[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Returns the tensors with each linear layer's weight [out_features, in_features] replaced by quantised ones."""
    compressed = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            compressed[name] = tensor
            continue
        values, scale = quantise(tensor, bits, group_size=tensor.shape[1] if bits == 8 else GROUP_SIZE)
        compressed[f"{name}_scale"] = scale
        if bits == 8:
            compressed[name] = values
        else:
            compressed[f"{name}_packed"] = pack(values)
            compressed[f"{name}_shape"] = torch.tensor(tensor.shape)
    return compressed


def quantise(weight: torch.Tensor, bits: int, *, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values, int8 [out_features, in_features], and scales [out_features, num_groups] in the weight's dtype."""
    largest = 2 ** (bits - 1) - 1
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    scale = (groups.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny).to(weight.dtype)
    values = (groups / scale.float()[..., None]).round().clamp(-largest - 1, largest)
    return values.to(torch.int8).reshape(weight.shape), scale


def pack(values: torch.Tensor) -> torch.Tensor:
    """Packs int8 [rows, columns] from -8 to 7 into int32 [rows, columns / 8], the first lowest, each plus 8."""
    unsigned = (values.to(torch.int64) + 8).reshape(values.shape[0], -1, VALUES_PER_WORD)
    words = (unsigned << (4 * torch.arange(VALUES_PER_WORD))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantization_config(bits: int) -> dict[str, Any]:
    """Returns the entry for config.json."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    if bits == 4:
        weights |= {"strategy": "group", "group_size": GROUP_SIZE}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if bits == 8 else None,
            }
        },
    }


if __name__ == "__main__":
    sys.exit(main())
