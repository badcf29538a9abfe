"""Adapters (LoRA) of an `LLM`, with vLLM's names."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.client import Client, GenerateOptions, RetryPolicy
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
        """Loads adapters that the router does not have, and returns the options by which each prompt chooses its own.

        Raises: ValueError if an adapter cannot be used; other OutriderErrors.
        """
        each = [requests] * num_prompts if isinstance(requests, LoRARequest | None) else requests
        if len(each) != num_prompts:
            raise ValueError(f"there are {num_prompts} prompts, but {len(each)} lora_requests")
        if not self._is_enabled and any(request is not None for request in each):
            raise ValueError("lora_request needs LLM(enable_lora=True)")
        if not any(each):
            return [GenerateOptions()] * num_prompts
        with self._loading, Client(self._target, retry=RetryPolicy()) as client:
            served = {adapter.name for adapter in client.model().adapters}  # a router that restarted may have lost some
            return [GenerateOptions() if request is None else self._load(request, client, served) for request in each]

    def _load(self, request: LoRARequest, client: Client, served: set[str]) -> GenerateOptions:
        path = os.path.abspath(request.lora_path)  # noqa: PTH100 a link may be replaced later, but not its name
        known, options = self._loaded.get(request.lora_name, (path, None))
        if known != path:
            raise ValueError(f"lora_request {request.lora_name!r} is {known} already, not {path}")
        if options is not None and request.lora_name in served:
            return options
        try:
            adapter = client.load_adapter(request.lora_name, path)
        except (AlreadyRunningError, InvalidRequestError, NotSupportedError) as error:
            raise ValueError(f"lora_request {request.lora_name!r}: {error.message}") from error
        options = GenerateOptions(model=adapter.name, adapter_fingerprint=adapter.fingerprint)
        self._loaded[request.lora_name] = path, options
        served.add(request.lora_name)
        return options
