"""Random heads of every form, written as their publishers write them, for `make_tiny_model`'s models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

NUM_DRAFTED_IDS = 120
"""Size of the draft vocabulary of forms that may draft a part of the vocabulary."""


class Maker:
    """Makes tensors by name. Equal seeds give equal tensors."""

    def __init__(self, seed: int, *, deviation: float = 0.1) -> None:
        """`deviation` is the standard deviation of the vectors' elements."""
        self.tensors: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._deviation = deviation

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(shape, generator=self._random) * gain / shape[-1] ** 0.5

    def vector(self, name: str, size: int, *, mean: float = 1.0) -> None:
        """Adds a vector under its full name."""
        self.tensors[name] = mean + self._deviation * torch.randn(size, generator=self._random)

    def ids(self, vocab_size: int, number: int = NUM_DRAFTED_IDS) -> Tensor:
        """Returns [number] int64, in ascending order."""
        return torch.randperm(vocab_size, generator=self._random)[:number].sort().values

    def layer(self, prefix: str, target: Mapping[str, Any], *, width: int = 0, is_normed: bool = True) -> None:
        """Adds a decoder layer of the target's shape. `width` is the width of attention's input."""
        hidden, inner = target["hidden_size"], target["intermediate_size"]
        head_dim = target.get("head_dim") or hidden // target["num_attention_heads"]
        if is_normed:
            self.vector(f"{prefix}input_layernorm.weight", hidden)
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            self.matrix(f"{prefix}self_attn.{name}_proj", target[heads] * head_dim, width or hidden)
        self.matrix(f"{prefix}self_attn.o_proj", hidden, target["num_attention_heads"] * head_dim)
        self.vector(f"{prefix}post_attention_layernorm.weight", hidden)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            self.matrix(f"{prefix}mlp.{name}_proj", *shape)


def _flat(target: Mapping[str, Any], architecture: str, **fields: Any) -> dict[str, Any]:
    kept = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    own = {name: target[name] for name in (*kept, "rms_norm_eps", "max_position_embeddings") if name in target}
    return {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1, **own, **fields}


def _eagle(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    hidden = target["hidden_size"]
    make.matrix("fc", hidden, 2 * hidden)
    make.layer("layers.0.", target, is_normed=False)
    return _flat(target, "LlamaForCausalLM")


def _eagle3(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a head with a draft vocabulary of its own."""
    hidden = target["hidden_size"]
    make.matrix("fc", hidden, 3 * hidden)
    make.layer("midlayer.", target, width=2 * hidden)
    make.vector("midlayer.hidden_norm.weight", hidden)
    make.vector("norm.weight", hidden)
    make.matrix("lm_head", NUM_DRAFTED_IDS, hidden)
    make.tensors["d2t"] = make.ids(target["vocab_size"]) - torch.arange(NUM_DRAFTED_IDS)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return _flat(target, "LlamaForCausalLMEagle3", draft_vocab_size=NUM_DRAFTED_IDS, eagle_config=taps)


def _peagle(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a head with a draft vocabulary of its own that drafts eight tokens by one forward."""
    config = _eagle3(make, target)
    make.tensors["mask_hidden"] = make.tensors["fc.weight"][:1, None].clone()
    return config | {"architectures": ["PEagleDraftModel"], "mask_token_id": 3}


def _dflash(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a head that drafts four tokens by one forward."""
    hidden = target["hidden_size"]
    make.matrix("fc", hidden, 2 * hidden)
    make.layer("layers.0.", target)
    make.vector("hidden_norm.weight", hidden)
    make.vector("norm.weight", hidden)
    block = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 2]}
    return _flat(target, "DFlashDraftModel", dflash_config=block)


def _dspark(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a head that drafts four tokens by one forward, each after the ones before."""
    config, rank = _dflash(make, target), 8
    for matrix, size in (("markov_w1", target["vocab_size"]), ("markov_w2", target["vocab_size"])):
        make.matrix(f"markov_head.{matrix}", size, rank)
    make.matrix("confidence_head.proj", 1, target["hidden_size"] + rank)
    make.vector("confidence_head.proj.bias", 1, mean=0.0)
    own = {"block_size": 4, "markov_rank": rank, "sample_from_anchor": True}
    return config | {"architectures": ["DSparkDraftModel"], "dflash_config": config["dflash_config"] | own}


def _medusa(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a head with a draft vocabulary of its own."""
    hidden = target["hidden_size"]
    for head in range(4):
        make.matrix(f"{head}.0.linear", hidden, hidden)
        make.vector(f"{head}.0.linear.bias", hidden, mean=0.0)
        make.matrix(f"{head}.1", NUM_DRAFTED_IDS, hidden)
    make.tensors["token_map"] = make.ids(target["vocab_size"])
    return {"medusa_num_heads": 4, "medusa_num_layers": 1, "truncated_vocab_size": NUM_DRAFTED_IDS}


def _mlp_speculator(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    hidden, inner, vocab_size = target["hidden_size"], 48, target["vocab_size"]
    for stage in range(4):
        make.matrix(f"speculator.emb.{stage}", vocab_size, inner)
        make.matrix(f"speculator.proj.{stage}", inner, inner if stage else hidden)
        make.matrix(f"speculator.head.{stage}", vocab_size, inner)
        make.vector(f"speculator.ln.{stage}.weight", inner)
        make.vector(f"speculator.ln.{stage}.bias", inner, mean=0.0)
    sizes = {"emb_dim": hidden, "inner_dim": inner, "vocab_size": vocab_size, "n_predict": 4}
    return {"model_type": "mlp_speculator", **sizes, "scale_input": True}


def _mtp(make: Maker, target: Mapping[str, Any]) -> dict[str, Any]:
    hidden = target["hidden_size"]
    make.layer("mtp_layers.0.", target)
    make.matrix("mtp_layers.0.input_proj", hidden, 2 * hidden)
    for norm in ("token", "hidden", "final"):
        make.vector(f"mtp_layers.0.{norm}_layernorm.weight", hidden)
    layer = {name: value for name, value in target.items() if name not in {"architectures", "dtype"}}
    return {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": layer}


HEADS: Mapping[str, Callable[[Maker, Mapping[str, Any]], dict[str, Any]]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "dspark": _dspark,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
}
"""The functions that make heads, by the form's name."""

WITH_OWN_IDS = ("eagle3", "peagle", "medusa")


def make_head(form: str, folder: Path, target: Path, *, seed: int = 0) -> Path:
    """Writes a head of this form for the model in `target`, and returns its folder."""
    make = Maker(seed)
    config = HEADS[form](make, json.loads((target / "config.json").read_text()))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in make.tensors.items()}, folder / "model.safetensors")
    return folder
