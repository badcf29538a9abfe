"""What a checkpoint says about text, from all of its files and with transformers' precedence. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelError

_MIN_FLOAT32 = 1.2e-38
_MAX_FLOAT32 = 3.4e38
_SAMPLING_RANGES: dict[str, tuple[type[float], float, float]] = {
    "temperature": (float, 0.0, _MAX_FLOAT32),
    "top_p": (float, _MIN_FLOAT32, 1.0),
    "top_k": (int, 0, 2**32 - 1),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, _MIN_FLOAT32, _MAX_FLOAT32),
}
"""By parameter that a generation_config.json may name: its type, and the contract's smallest and largest value."""


def default_sampling(files: Mapping[str, bytes]) -> dict[str, float]:
    """The fields of SamplingParams that generation_config.json names. As vLLM, whatever `do_sample` says.

    `files`: by name. A value that the contract does not allow is left out. Raises: ModelError.
    """
    config = read_object(files, "generation_config.json")
    found: dict[str, float] = {}
    for name, (kind, smallest, largest) in _SAMPLING_RANGES.items():
        value = config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and smallest <= value <= largest:
            found[name] = kind(value)
    return found


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object of a file; {} without it. Raises: ModelError when it is not one."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ModelError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} is not a JSON object")
    return value
