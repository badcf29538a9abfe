"""Configurations of other servers in our settings: files of TensorRT-LLM, Dynamo and vLLM, flags of `vllm serve`.

The tables beside this file say what each key is here: `tensorrt_llm.yaml`, `vllm.yaml`.
"""

from __future__ import annotations

from outrider.config.imports.base import ForeignKey, Imported, Kind
from outrider.config.imports.formats import FORMATS, open_format, parse_reference, read_import
from outrider.config.imports.vllm_flags import add_vllm_flags, read_vllm_flags, vllm_settings

__all__ = [
    "FORMATS",
    "ForeignKey",
    "Imported",
    "Kind",
    "add_vllm_flags",
    "open_format",
    "parse_reference",
    "read_import",
    "read_vllm_flags",
    "vllm_settings",
]
