"""Configurations of other servers in our settings: files of TensorRT-LLM, Dynamo and vLLM, flags of `vllm serve`.

The table beside this file, `keys.yaml`, says what each key is here. `vllm_settings` is for scripts; here are vLLM's
arguments: from Python, and as flags that `outrider up` has too.
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
    "gpu_memory_utilization": float,
}
"""Types of their values; those of bool have `--no-…` too."""
PREFIX = "vllm:"
"""Of their names in the parsed command line."""


def vllm_entries(arguments: Mapping[str, Any], *, source: str) -> list[Entry]:
    """`arguments` of `load_config`. `source` begins errors and warnings, before the argument's name.

    A `speculative_config` of None is no speculation; any other None is the default.
    """
    return [Entry(key=name, value=value, source=source) for name, value in arguments.items()]


def vllm_settings(arguments: Mapping[str, Any], *, target: str = "", source: str = "argument") -> Imported:
    """Arguments of vLLM in our settings: `.overrides` for a `Launch`, and `.warnings`.

    `target`: the served model, which MTP heads come with. Otherwise as `vllm_entries`.

    Raises: ConfigError for what cannot be honoured.
    """
    return Imported(keys=translate(vllm_entries(arguments, source=source), target=target))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vllm serve, see docs/configuration.md")
    for name, kind in FLAGS.items():
        value = {"type": kind, "metavar": "JSON" if name == SPECULATIVE else "X"}
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else value
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"{PREFIX}{name}", **options)


def read_vllm_flags(arguments: argparse.Namespace) -> list[Entry]:
    """Of those flags that were given."""
    given = {name.removeprefix(PREFIX): value for name, value in vars(arguments).items() if name.startswith(PREFIX)}
    return vllm_entries({name: value for name, value in given.items() if value is not None}, source="flag")
