"""A target with longer steps and the same text: layers are appended that add nothing to the residual stream.

A drafter has to be trained for its target. With this target, a step takes as long as that of a deeper model, while the
text and the features, and so the acceptance, are those of the model that the drafter was trained for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.model_hub.default_model import MANIFEST

STANDARD_DEVIATION = 0.02


def write_slower_target(source: Path, directory: Path, *, num_added_layers: int) -> None:
    """Writes a Llama checkpoint with more layers.

    `source`: a directory in transformers' layout with one file of weights. The weights of the added layers are random,
    because kernels may take less time for zeros. Only those of the two projections onto the residual stream are zero.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != MANIFEST:
            shutil.copy(path, directory)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    num_layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_layers + num_added_layers
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(source / "model.safetensors")
    template = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.")}
    generator = torch.Generator().manual_seed(0)
    for number in range(num_layers, num_layers + num_added_layers):
        for name, weight in template.items():
            added = weight.clone()
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                added.zero_()
            elif weight.dim() == 2:
                added.normal_(std=STANDARD_DEVIATION, generator=generator)
            weights[name.replace(".0.", f".{number}.", 1)] = added
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
