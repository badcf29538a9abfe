"""Configurations of other servers in our settings: files of TensorRT-LLM, Dynamo and vLLM, flags of `vllm serve`.

The tables beside this file say what each key is here: `tensorrt_llm.yaml`, `vllm.yaml`.
"""

from __future__ import annotations

from outrider.config.imports.base import Imported, Kind, Outcome
from outrider.config.imports.formats import FORMATS, open_format, parse_reference, read_import
from outrider.config.imports.vllm_flags import add_vllm_flags, read_vllm_flags, speculative_settings

__all__ = [
    "FORMATS",
    "Imported",
    "Kind",
    "Outcome",
    "add_vllm_flags",
    "open_format",
    "parse_reference",
    "read_import",
    "read_vllm_flags",
    "speculative_settings",
]
