"""Configurations of other servers, in our settings: TensorRT-LLM's YAML, vLLM's files and flags."""

from __future__ import annotations

from outrider.config.imports.base import Imported, Kind, Outcome
from outrider.config.imports.vllm import speculative_settings

__all__ = ["Imported", "Kind", "Outcome", "speculative_settings"]
