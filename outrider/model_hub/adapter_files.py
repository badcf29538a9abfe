"""Reads adapters (LoRA) in PEFT's format. Torch-free. The files are not trusted: clients may name them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from outrider.engine.arrays import from_bfloat16
from outrider.engine.low_rank import Floats, LowRank, LowRanks
from outrider.errors import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1024
"""Maximum rank of a layer. A step needs memory for its rows × the rank."""
MAX_LAYERS = 1024
"""Maximum number of layers with A and B, and of patterns in `alpha_pattern`. Each is matched with each layer's name."""
MAX_ALPHA = 1e6
MAX_JSON_BYTES = 2 << 20  # of adapter_config.json, and of the header of the weights: about 300 bytes for each layer
LENGTH_BYTES = 8
_REPR = reprlib.Repr()
_REPR.maxstring = 100
_shown = _REPR.repr  # of names and values from a file: short, without control characters
_TENSOR = re.compile(r"base_model\.model\.([\w.]{1,64})\.lora_([AB])\.weight", re.ASCII)
_TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "use_rslora": (None, False, True),
    "fan_in_fan_out": (None, False),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "layer_replication"), (None, False)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config"), (None,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), (None, [], {})),
}
"""Settings of PEFT that must have one of these values, because others change more than linear layers, or otherwise.
Other values of init_lora_weights change the model's own weights."""
_IGNORED = frozenset(
    {
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "ensure_weight_tying"),
    }
)
"""Settings of PEFT that may have any value: they are read elsewhere, name what the tensors tell, or matter only to
training. Unknown settings may only be unset, false, empty or a number, such as qalora_group_size."""
MAX_PATTERN_LENGTH = 128
MAX_REPEATING_PATTERNS = 64
"""Maximum number of patterns with a quantifier, which take long to match. Such a pattern may have only one."""
_PATTERN = re.compile(r"\^?(?:(?:[\w.-]|\\[.d]|\[[\w-]+\])[*+?]?)+\$?")
"""The regular expressions that are matched. Those with groups may take very long."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's directory."""

    parts: LowRanks
    fingerprint: str  # SHA-256 in hexadecimal over its tensors and their scaling
    num_bytes: int  # of the tensors in float32


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor's place in the file."""

    first: int
    end: int
    type: np.dtype[Any]
    shape: tuple[int, int]


def read_adapter(directory: Path, *, root: Path | None = None, max_bytes: int | None = None) -> AdapterFiles:
    """Reads an adapter's directory.

    `root`: a resolved directory that links in it may not leave. `max_bytes`: of its tensors in float32; None: any.

    Raises: ModelError if the adapter is damaged, larger or not supported, which it explains.
    """
    path = directory / CONFIG_FILE
    with _open(path, root) as file:
        about = _parse(file.read(MAX_JSON_BYTES + 1), path)
    _check_settings(about, path)
    scaling_of = _scaling_of(about, path)
    path = directory / WEIGHTS_FILE
    hasher, parts = hashlib.sha256(b"outrider.adapter.1"), {}
    with _open(path, root) as file:
        pairs = _read_header(file, path)
        num_bytes = sum(4 * math.prod(tensor.shape) for pair in pairs.values() for tensor in pair.values())
        if max_bytes is not None and num_bytes > max_bytes:
            raise ModelError(f"{path} needs {num_bytes:,} bytes, more than model.adapter_memory_bytes ({max_bytes:,})")
        for module, pair in sorted(pairs.items()):
            scaling = scaling_of(module, pair["A"].shape[0])
            down, raw = (_read_tensor(file, pair[part], path) for part in "AB")
            with np.errstate(over="ignore", invalid="ignore"):
                up = raw * np.float32(scaling)
            if not (np.isfinite(down).all() and np.isfinite(up).all()):
                raise ModelError(f"{path}: {module} has numbers that are not finite")
            hasher.update(f"\0{module}\0{scaling!r}\0{down.shape}\0{raw.shape}\0".encode())
            hasher.update(down.data)
            hasher.update(raw.data)
            parts[module] = LowRank(down, up)
    return AdapterFiles(parts, hasher.hexdigest(), num_bytes)


def _check_settings(about: Mapping[str, Any], path: Path) -> None:
    for name, value in about.items():
        allowed = _PLAIN.get(name)
        is_unset = not value or (isinstance(value, (int, float)) and value is not True)
        if name in _IGNORED or (is_unset if allowed is None else any(value == each for each in allowed)):
            continue
        hint = "adapters may only have pairs of A and B for linear layers (LoRA); train one without it, or merge it"
        if name == "init_lora_weights":
            hint = "it changes the model's own weights; save the adapter with path_initial_model_for_weight_conversion"
        raise ModelError(f"{path}: {_shown(name)} {_shown(value)} is not supported: {hint}")


def _scaling_of(about: Mapping[str, Any], path: Path) -> Callable[[str, int], float]:
    """Returns scaling(module, rank), the factor of B A, with `lora_alpha` and `alpha_pattern` as PEFT matches it."""
    patterns, ranks = about.get("alpha_pattern") or {}, about.get("rank_pattern") or {}
    if not (isinstance(patterns, dict) and isinstance(ranks, dict) and len(patterns) <= MAX_LAYERS):
        raise ModelError(f"{path}: alpha_pattern or rank_pattern is no object, or has over {MAX_LAYERS:,} patterns")
    alphas, num_repeating = [], 0
    for pattern, alpha in (*patterns.items(), (".*", about.get("lora_alpha", 8))):
        num_quantifiers = sum(map(pattern.count, "*+?"))
        num_repeating += num_quantifiers > 0
        is_quick = num_quantifiers <= 1 and num_repeating <= MAX_REPEATING_PATTERNS + 1  # that of lora_alpha
        if not (is_quick and len(pattern) <= MAX_PATTERN_LENGTH and _PATTERN.fullmatch(pattern)):
            raise ModelError(f"{path}: the pattern {_shown(pattern)} is not supported: name the layer, or use .* in it")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= MAX_ALPHA:
            raise ModelError(f"{path}: {_shown(alpha)} is no lora_alpha: it is a number up to {MAX_ALPHA:,.0f}")
        try:
            alphas.append((re.compile(rf"(.*\.)?({pattern})"), float(alpha)))
        except re.error as error:
            raise ModelError(f"{path}: the pattern {_shown(pattern)} is not valid: {error}") from error

    def scaling(module: str, rank: int) -> float:
        if rank not in (about.get("r", rank), *ranks.values()):
            raise ModelError(f"{path}: {module} has rank {rank}, but r {_shown(about.get('r'))}")
        alpha = next(alpha for pattern, alpha in alphas if pattern.fullmatch(module))
        return alpha / (math.sqrt(rank) if about.get("use_rslora") else rank)

    return scaling


def _read_header(file: BinaryIO, path: Path) -> dict[str, dict[str, _Tensor]]:
    """Reads a safetensors header. Returns A and B of each module, with offsets in the file. Raises: ModelError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if LENGTH_BYTES + length > size:
        raise ModelError(f"{path} is damaged: its header should have {length:,} bytes, but the file has {size:,}")
    header = _parse(file.read(min(length, MAX_JSON_BYTES + 1)), path)
    pairs: dict[str, dict[str, _Tensor]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if (found := _TENSOR.fullmatch(name)) is None:
            raise ModelError(f"{path}: {_shown(name)} is not supported: it is no A or B of a linear layer")
        pairs.setdefault(found[1], {})[found[2]] = _tensor(name, entry, LENGTH_BYTES + length, path)
    end = LENGTH_BYTES + length
    for tensor in sorted((tensor for pair in pairs.values() for tensor in pair.values()), key=lambda each: each.first):
        end = tensor.end if tensor.first == end else -1
    if end != size:
        raise ModelError(f"{path} is damaged: its tensors do not fill it exactly; copy or download it again")
    if not 1 <= len(pairs) <= MAX_LAYERS:
        raise ModelError(f"{path} has A and B of {len(pairs):,} layers; 1 to {MAX_LAYERS:,} are supported")
    for module, pair in pairs.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ModelError(f"{path}: {module} has no A and B of the same rank")
        if pair["A"].shape[0] > MAX_RANK:
            raise ModelError(f"{path}: {module} has rank {pair['A'].shape[0]}, but it may be at most {MAX_RANK:,}")
    return pairs


def _tensor(name: str, entry: Any, start: int, path: Path) -> _Tensor:
    match entry:
        case {"dtype": str(kind), "shape": [int(rows), int(columns)], "data_offsets": [int(first), int(end)]} if (
            kind in _TYPES
            and min(rows, columns) > 0
            and first >= 0
            and end - first == rows * columns * _TYPES[kind].itemsize
        ):
            return _Tensor(start + first, start + end, _TYPES[kind], (rows, columns))
    raise ModelError(f"{path}: {_shown(name)} {_shown(entry)} is no matrix of {', '.join(_TYPES)} and its place")


def _read_tensor(file: BinaryIO, tensor: _Tensor, path: Path) -> Floats:
    """Reads a tensor as float32. Raises: ModelError, OSError."""
    file.seek(tensor.first)
    data = file.read(tensor.end - tensor.first)
    if len(data) != tensor.end - tensor.first:
        raise ModelError(f"{path} became shorter while it was read")
    values = np.frombuffer(data, tensor.type).reshape(tensor.shape)
    return from_bfloat16(values) if values.dtype == np.uint16 else values.astype(np.float32, copy=False)


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    """Parses a JSON object. Raises: ModelError if it is damaged, or has over MAX_JSON_BYTES."""
    if len(text) > MAX_JSON_BYTES:
        raise ModelError(f"{path} has over {MAX_JSON_BYTES:,} bytes of JSON, which no adapter has")
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its JSON is not valid: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it is not a JSON object")
    return value


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        raise ValueError("an object has a key twice")
    return found


@contextmanager
def _open(path: Path, root: Path | None) -> Iterator[BinaryIO]:
    """Opens a regular file for reading. Raises: ModelError for others, or if it cannot be opened or read."""
    real = Path(os.path.realpath(path))  # unlike Path.resolve, it raises nothing
    if root is not None and not real.is_relative_to(root):
        raise ModelError(f"{path} is a link to a file that is not below model.adapter_directory")
    try:
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is not a file")
            yield file
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
