"""Adapters (LoRA) of an `LLM`, with vLLM's names."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.client import Client, GenerateOptions
from outrider.errors import AlreadyRunningError, InvalidRequestError, NotSupportedError

ADAPTER_ROOT = "/"
"""The `model.adapter_directory` of an LLM's nodes: its script may name any directory."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in PEFT's format. It is loaded when it is first used."""

    lora_name: str
    lora_int_id: int  # not used: adapters are told apart by their names
    lora_path: str  # a directory


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LoadedAdapters:
    """Loads the adapters of a cluster's requests. Thread-safe."""

    def __init__(self, target: str, *, is_enabled: bool) -> None:
        """`target`: the router's address."""
        self._target = target
        self._is_enabled = is_enabled
        self._loaded: dict[str, tuple[str, GenerateOptions]] = {}  # by name: directory, and options that choose it
        self._loading = threading.Lock()

    def options_of(self, requests: LoRARequests, num_prompts: int) -> list[GenerateOptions]:
        """Loads the adapters, and returns the options by which each prompt chooses its own.

        Raises: ValueError if an adapter cannot be used; other OutriderErrors.
        """
        each = [requests] * num_prompts if isinstance(requests, LoRARequest | None) else requests
        if len(each) != num_prompts:
            raise ValueError(f"there are {num_prompts} prompts, but {len(each)} lora_requests")
        if not self._is_enabled and any(request is not None for request in each):
            raise ValueError("lora_request needs LLM(enable_lora=True)")
        with self._loading:
            return [GenerateOptions() if request is None else self._load(request) for request in each]

    def _load(self, request: LoRARequest) -> GenerateOptions:
        path = os.path.abspath(request.lora_path)  # noqa: PTH100 a link may be replaced later, but not its name
        known, options = self._loaded.get(request.lora_name, (path, None))
        if known != path:
            raise ValueError(f"lora_request {request.lora_name!r} is {known} already, not {path}")
        if options is not None:
            return options
        try:
            with Client(self._target) as client:
                adapter = client.load_adapter(request.lora_name, os.path.relpath(path, ADAPTER_ROOT))
        except (AlreadyRunningError, InvalidRequestError, NotSupportedError) as error:
            raise ValueError(f"lora_request {request.lora_name!r}: {error.message}") from error
        options = GenerateOptions(model=adapter.name, adapter_fingerprint=adapter.fingerprint)
        self._loaded[request.lora_name] = path, options
        return options
