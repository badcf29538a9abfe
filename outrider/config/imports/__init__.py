"""Configurations of other servers in our settings: files of TensorRT-LLM, Dynamo and vLLM, flags of `vllm serve`.

The table beside this file, `keys.yaml`, says what each key is here.
"""

from __future__ import annotations

from outrider.config.imports.translate import rules, translate
from outrider.config.imports.translated import SPECULATIVE, Imported, Kind, Translated
from outrider.config.imports.vllm_arguments import add_vllm_flags, read_vllm_flags, vllm_entries, vllm_settings

__all__ = [
    "SPECULATIVE",
    "Imported",
    "Kind",
    "Translated",
    "add_vllm_flags",
    "read_vllm_flags",
    "rules",
    "translate",
    "vllm_entries",
    "vllm_settings",
]
