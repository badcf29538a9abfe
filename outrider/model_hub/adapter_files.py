"""Reads adapters (LoRA) in PEFT's format. Torch-free."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.engine.arrays import from_bfloat16
from outrider.engine.low_rank import Floats, LowRank, LowRanks
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.fingerprint import read_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (None, False),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "layer_replication"), (None, False)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config"), (None,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), (None, [], {})),
}
"""Settings of PEFT that must have one of these values, because others change more than linear layers, or otherwise."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's directory."""

    parts: LowRanks
    fingerprint: str  # SHA-256 in hexadecimal over its tensors and their scaling


def read_adapter(directory: Path) -> AdapterFiles:
    """Reads an adapter's directory. Raises: ModelError if it is damaged or not supported, which it explains."""
    about = read_json(directory / CONFIG_FILE)
    if not about:
        raise ModelError(f"{directory} is no adapter in PEFT's format: it has no {CONFIG_FILE}")
    for name, allowed in _PLAIN.items():
        value = about.get(name, allowed[0])
        if not any(value == each for each in allowed):
            raise ModelError(
                f"{directory / CONFIG_FILE}: {name} {value!r} is not supported: adapters may only have pairs of A and "
                "B for linear layers (LoRA); train one without it, or merge the adapter into the model"
            )
    try:
        tensors = _read_tensors(directory / WEIGHTS_FILE)
    except OSError as error:
        raise ModelError(f"{directory / WEIGHTS_FILE} cannot be read: {error.strerror}") from error
    pairs: dict[str, dict[str, Floats]] = {}
    for name, values in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or values.ndim != 2:
            raise ModelError(f"{directory / WEIGHTS_FILE}: {name} is not supported: it is no A or B of a linear layer")
        pairs.setdefault(found[1], {})[found[2]] = values
    if not pairs:
        raise ModelError(f"{directory / WEIGHTS_FILE} has no tensors")
    hasher, parts = hashlib.sha256(b"outrider.adapter.1"), {}
    for module, pair in sorted(pairs.items()):
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ModelError(f"{directory / WEIGHTS_FILE}: {module} has no A and B of the same rank")
        scaling = _scaling(about, module, rank=len(pair["A"]), path=directory / CONFIG_FILE)
        hasher.update(f"\0{module}\0{scaling!r}\0{pair['A'].shape}\0{pair['B'].shape}\0".encode())
        hasher.update(pair["A"].tobytes())
        hasher.update(pair["B"].tobytes())
        parts[module] = LowRank(pair["A"], pair["B"] * np.float32(scaling))
    return AdapterFiles(parts, hasher.hexdigest())


def _scaling(about: Mapping[str, Any], module: str, *, rank: int, path: Path) -> float:
    """Returns the factor of B A. `lora_alpha` and its patterns by module are PEFT's."""
    alpha = _of_module(about.get("alpha_pattern"), module, about.get("lora_alpha", 8))
    expected = _of_module(about.get("rank_pattern"), module, about.get("r", rank))
    if not isinstance(alpha, (int, float)) or rank < 1 or rank != expected:
        raise ModelError(f"{path}: {module} has rank {rank}, but r {expected} and lora_alpha {alpha!r}")
    return float(alpha) / (math.sqrt(rank) if about.get("use_rslora") else rank)


def _of_module(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _read_tensors(path: Path) -> dict[str, Floats]:
    """Reads a safetensors file as float32. Raises: ModelError, OSError."""
    start, header = read_header(path)
    data = path.read_bytes()
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _TYPES:
            raise ModelError(f"{path}: {name} has the type {entry['dtype']}; {', '.join(_TYPES)} are supported")
        first, end = entry["data_offsets"]
        try:
            values = np.frombuffer(data[start + first : start + end], _TYPES[entry["dtype"]]).reshape(entry["shape"])
        except ValueError as error:
            raise ModelError(f"{path} is damaged: {name}: {error}") from error
        tensors[name] = from_bfloat16(values) if values.dtype == np.uint16 else values.astype(np.float32)
    return tensors
