"""Arguments of vLLM from Python, and flags of `vllm serve` that `outrider up` has too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from outrider.config.imports.base import SPECULATIVE, Imported
from outrider.config.imports.formats import flattened, open_format
from outrider.errors import ConfigError

FLAGS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "tensor_parallel_size"),
    *("pipeline_parallel_size", "served_model_name", "revision", "kv_cache_dtype", "block_size", "quantization"),
    *("seed", "host", SPECULATIVE),
)
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "trust_remote_code")
"""Those that have `--no-…`."""
TEXTS = ("served_model_name", "revision")
"""Those whose values stand as they are: 0123456 is no octal number, and `on` is a name."""


def vllm_settings(arguments: Mapping[str, Any], *, target: str = "", source: str = "argument") -> Imported:
    """Arguments of vLLM in our settings: `.overrides` for a `Launch`, and `.warnings`.

    `target`: the served model, which MTP heads come with. A `speculative_config` of None is no speculation; any other
    None is the default. `source` begins errors and warnings, before the argument's name.

    Raises: ConfigError for what cannot be honoured.
    """
    keys = [key for name, value in arguments.items() for key in flattened(value, source, name)]
    return Imported(keys=open_format("vllm").translate(keys, target=target))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vllm serve, see docs/configuration.md")
    for name in FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="JSON" if name == SPECULATIVE else "X")
    for name in SWITCHES:
        group.add_argument(f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction)


def read_vllm_flags(arguments: argparse.Namespace, *, target: str = "") -> Imported:
    """Of those flags that were given. Raises: ConfigError."""
    import yaml

    given = {name: getattr(arguments, name) for name in (*FLAGS, *SWITCHES) if getattr(arguments, name) is not None}
    for name, value in given.items():
        try:
            given[name] = yaml.safe_load(value) if isinstance(value, str) and name not in TEXTS else value  # or JSON
        except yaml.YAMLError as error:
            raise ConfigError(f"flag {name}: neither a value nor JSON: {value!r}") from error
    return vllm_settings(given, target=target, source="flag")
