"""Imports configurations of other servers: files of TensorRT-LLM, Dynamo and vLLM, and flags of `vllm serve`.

`keys.yaml`, next to this file, maps each key to Outrider's settings. This module takes vLLM's arguments, either from
Python scripts (`vllm_settings`) or as flags of `outrider up`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from outrider.config.imports.translate import SPECULATIVE, Imported, translate
from outrider.config.yaml_files import Entry

FLAGS: dict[str, type] = {
    **dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens", "served_model_name", "revision"), str),
    **dict.fromkeys(("kv_cache_dtype", "quantization", "host", "api_key", SPECULATIVE), str),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "block_size", "seed"), int),
    **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "trust_remote_code"), bool),
    "enable_lora": bool,
    "lora_modules": list,
    "gpu_memory_utilization": float,
}
"""Types of the values of vLLM's arguments. A bool argument also has a `--no-…` flag."""
PREFIX = "vllm:"
"""Prefix of vLLM's arguments in argparse's namespace."""


def vllm_entries(arguments: Mapping[str, Any], *, source: str) -> list[Entry]:
    """Returns entries for the parameter `arguments` of `load_config`. In errors and warnings, `source` precedes an
    argument's name.

    A `speculative_config` of None turns speculation off; for any other argument, None means the default.
    """
    return [Entry(key=name, value=value, source=source) for name, value in arguments.items()]


def vllm_settings(arguments: Mapping[str, Any], *, target: str = "", source: str = "argument") -> Imported:
    """Translates vLLM's arguments to Outrider's settings. The result has `.overrides` for a `Launch`, and `.warnings`.

    `target` is the served model, whose folder may have MTP heads. `arguments` and `source` are as for `vllm_entries`.

    Raises: ConfigError for an argument that cannot be honoured.
    """
    return Imported(keys=translate(vllm_entries(arguments, source=source), target=target))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vllm serve, see docs/configuration.md")
    for name, kind in FLAGS.items():
        value = {"type": kind, "metavar": "JSON" if name == SPECULATIVE else "X"}
        if kind is list:
            value = {"nargs": "+", "metavar": "NAME=PATH"}
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else value
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{PREFIX}{name}", **options)


def read_vllm_flags(arguments: argparse.Namespace) -> list[Entry]:
    """Returns entries for the flags that were given."""
    given = {name.removeprefix(PREFIX): value for name, value in vars(arguments).items() if name.startswith(PREFIX)}
    return vllm_entries({name: value for name, value in given.items() if value is not None}, source="flag")
