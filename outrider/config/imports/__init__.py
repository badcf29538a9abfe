"""Configurations of other servers in our settings: files of TensorRT-LLM, Dynamo and vLLM, flags of `vllm serve`.

The table beside this file, `keys.yaml`, says what each key is here. `vllm_settings` is for scripts.
"""

from __future__ import annotations

from outrider.config.imports.vllm_arguments import vllm_settings

__all__ = ["vllm_settings"]
