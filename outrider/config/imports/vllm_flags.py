"""Flags of `vllm serve` that `outrider up` has too, and vLLM's `speculative_config` from Python."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from outrider.config.imports.base import Imported
from outrider.config.imports.formats import flattened, open_format
from outrider.config.imports.speculation import SPECULATIVE
from outrider.errors import ConfigError

FLAGS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "tensor_parallel_size"),
    *("pipeline_parallel_size", "served_model_name", "revision", "kv_cache_dtype", "block_size", "quantization"),
    *("seed", "host", SPECULATIVE),
)
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "trust_remote_code")
"""Those that have `--no-…`."""


def speculative_settings(config: Mapping[str, Any] | None, *, target: str = "", source: str = "argument") -> Imported:
    """A `speculative_config` of vLLM in our settings: `.overrides` for a `Launch`, and `.warnings`.

    `target`: the served model, which MTP heads come with. None as a config is no speculation.

    Raises: ConfigError, naming the key, for what cannot be honoured.
    """
    entries = flattened(config, source, SPECULATIVE)
    return Imported(outcomes=open_format("vllm").translate(entries, target=target))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vllm serve, as far as they mean something here")
    for name in FLAGS:
        group.add_argument(_flag(name), metavar="JSON" if name == SPECULATIVE else "X")
    for name in SWITCHES:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction)


def read_vllm_flags(arguments: argparse.Namespace, *, target: str = "") -> Imported:
    """Of those flags that were given. Raises: ConfigError."""
    import yaml

    entries = []
    for name in (*FLAGS, *SWITCHES):
        value = getattr(arguments, name)
        try:
            value = yaml.safe_load(value) if isinstance(value, str) else value  # JSON is YAML
        except yaml.YAMLError as error:
            raise ConfigError(f"{_flag(name)}: neither a value nor JSON: {value!r}") from error
        entries += [] if getattr(arguments, name) is None else flattened(value, _flag(name), name)
    return Imported(outcomes=open_format("vllm").translate(entries, target=target))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
