"""Random adapters (LoRA) in PEFT's format, and models into which they are merged."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import AbortedError, AlreadyRunningError, MismatchError, NotAllowedError, NotFoundError
from outrider.request import Adapter
from tests.support.fake_engine import ScriptedModel

MAX_LOAD_SECONDS = 30.0

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    path: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    scale: float = 0.5,
) -> Path:
    """Writes a random adapter for the checkpoint `model` to `path`, and returns it. Neither A nor B is zero.

    `config` goes into adapter_config.json.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            out_features, in_features = weight.shape
            for part, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                values = scale * torch.randn(shape, generator=generator) / in_features**0.25
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.to(getattr(torch, dtype))
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        **(config or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(about))
    return path


def merge_adapter(model: Any, adapter: Path, *, scaling: float = 2.0) -> Any:
    """Adds the adapter's products to the weights of a transformers model, and returns the model."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
                up = tensors[name.replace("lora_A", "lora_B")]
                module.weight += scaling * (up.float() @ down.float()).to(module.weight.dtype)
    return model


class ScriptedAdapters:
    """A node's adapters for a ScriptedEngine. Each has the hash of its directory's name, and is a model of its own.

    `fixed`: the names of adapters that cannot be unloaded. `proceeds`: while it is not set, loading takes its time.
    `salt`: makes the same directories other adapters. `num_loads`, `num_loaded`: the loads that have begun and ended.
    `has_ended`: the last load's.
    """

    def __init__(self, *adapters: Adapter, vocab_size: int = 32, fixed: Sequence[str] = (), salt: str = "") -> None:
        self._vocab_size = vocab_size
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._fixed = fixed
        self.salt = salt
        self.refusal: Exception | None = None  # raised by `load`
        self.proceeds = threading.Event()
        self.proceeds.set()
        self.num_loads = self.num_loaded = 0
        self.has_ended: Callable[[], bool] = lambda: False

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(adapter for _, adapter in sorted(self._by_name.items()))

    def find(self, adapter: Adapter) -> ScriptedModel | None:
        if self._by_name.get(adapter.name) != adapter:
            return None
        return ScriptedModel(vocab_size=self._vocab_size, seed=int(adapter.fingerprint[:8], 16))

    def load(
        self, name: str, directory: str, fingerprint: str = "", has_ended: Callable[[], bool] = lambda: False
    ) -> Adapter:
        self.num_loads += 1
        self.has_ended = has_ended
        try:
            return self._load(name, directory, fingerprint)
        finally:
            self.num_loaded += 1

    def _load(self, name: str, directory: str, fingerprint: str) -> Adapter:
        if self.refusal is not None:
            raise self.refusal
        has_ended = self.has_ended
        self.proceeds.wait(MAX_LOAD_SECONDS)
        adapter = Adapter(name, hashlib.sha256((directory + self.salt).encode()).hexdigest())
        if fingerprint not in ("", adapter.fingerprint):
            raise MismatchError("the directory has another adapter", reason="ADAPTER_MISMATCH")
        if has_ended():
            raise AbortedError("the call has ended")
        if self._by_name.setdefault(name, adapter) != adapter:
            raise AlreadyRunningError(f"another adapter has the name {name!r}", reason="ADAPTER_EXISTS")
        return adapter

    def unload(self, name: str, fingerprint: str = "") -> None:
        found = self._by_name.get(name)
        if found is None or fingerprint not in ("", found.fingerprint):
            raise NotFoundError(f"there is no adapter {name!r}", reason="ADAPTER_NOT_FOUND")
        if name in self._fixed:
            raise NotAllowedError(f"{name!r} is one of model.adapters", reason="ADAPTERS_ARE_FIXED")
        del self._by_name[name]
