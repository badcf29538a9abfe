"""The adapters (LoRA) that a node has: those of its settings, and those that are loaded while it runs. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from outrider.engine.cpu_kernels.adapter import NativeAdapter
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.low_rank import LowRanks, PackedAdapter
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import (
    AlreadyRunningError,
    ConfigError,
    InvalidRequestError,
    ModelError,
    NotAllowedError,
    NotFoundError,
    NotSupportedError,
)
from outrider.model_hub.adapter_files import read_adapter
from outrider.model_hub.config import ModelConfig
from outrider.request import Adapter

MAX_NAME_LENGTH = 128
RANKS_HAVE_NONE = "adapters are not supported with model.tensor_parallel_size"


class AdapterTable:
    """Adapters by name. Any thread may call it; loading takes as long as reading the files.

    Running sequences keep their adapter, so unloading does not affect them.
    """

    def __init__(self, model: RunnableModel, *, model_name: str, config: ModelConfig) -> None:
        """Loads the adapters of `model.adapters`. Raises: ConfigError, ModelError."""
        self._pack = _packer(model, config)
        self._model_name = model_name
        self._root = Path(config.adapter_directory).expanduser().resolve() if config.adapter_directory else None
        self._by_name: dict[str, tuple[Adapter, PackedAdapter]] = {}
        self._changing = threading.Lock()
        if self._pack is None and (config.adapters or config.adapter_directory):
            raise ConfigError(f"{RANKS_HAVE_NONE}; unset model.adapters and model.adapter_directory")
        for name, directory in _pairs(config.adapters):
            self._load(name, Path(directory).expanduser())

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters by name."""
        return tuple(adapter for _, (adapter, _) in sorted(self._by_name.items()))

    def find(self, adapter: Adapter) -> PackedAdapter | None:
        """Returns an adapter, or None if the node does not have it, or another one of its name."""
        found = self._by_name.get(adapter.name)
        return found[1] if found is not None and found[0] == adapter else None

    def load(self, name: str, directory: str) -> Adapter:
        """Loads an adapter from a directory below `model.adapter_directory`. Does nothing if it is loaded already.

        Raises: NotAllowedError without that setting, or for another directory; NotSupportedError, AlreadyRunningError;
        InvalidRequestError if there is no valid adapter.
        """
        root = self._check_allowed()
        if not (1 <= len(name) <= MAX_NAME_LENGTH and name.isascii() and name.isprintable()):
            message = f"name must have 1 to {MAX_NAME_LENGTH} characters, all printable ASCII"
            raise InvalidRequestError(message, field="name")
        path = (root / directory).resolve()
        if not path.is_relative_to(root) or path == root:
            message = f"directory {directory!r} is not below model.adapter_directory"
            raise NotAllowedError(message, reason="ADAPTER_DIRECTORY")
        try:
            return self._load(name, path)
        except ModelError as error:
            message = error.message.replace(str(path), directory)
            raise InvalidRequestError(message, field="directory", reason="BAD_ADAPTER") from error

    def unload(self, name: str) -> None:
        """Unloads an adapter. Raises: NotAllowedError without `model.adapter_directory`; NotFoundError."""
        self._check_allowed()
        with self._changing:
            if self._by_name.pop(name, None) is None:
                raise NotFoundError(f"there is no adapter {name!r}", reason="ADAPTER_NOT_FOUND")

    def _load(self, name: str, directory: Path) -> Adapter:
        if self._pack is None:
            raise NotSupportedError(RANKS_HAVE_NONE, field="name")
        files = read_adapter(directory)
        adapter = Adapter(name, files.fingerprint)
        with self._changing:
            found = self._by_name.get(name)
            if found is not None and found[0] == adapter:
                return adapter
            if found is not None or name == self._model_name:
                what = "the model has" if found is None else "another adapter has"
                raise AlreadyRunningError(f"{what} the name {name!r}", reason="ADAPTER_EXISTS")
            try:
                packed = self._pack(files.parts)
            except ModelError as error:
                raise ModelError(f"{directory} does not fit {self._model_name}: {error.message}") from error
            self._by_name[name] = adapter, packed
        return adapter

    def _check_allowed(self) -> Path:
        if self._root is None:
            message = "adapters cannot be loaded or unloaded while the node runs: set model.adapter_directory"
            raise NotAllowedError(message, reason="ADAPTERS_ARE_FIXED")
        return self._root


def _packer(model: RunnableModel, config: ModelConfig) -> Callable[[LowRanks], PackedAdapter] | None:
    """Returns a function that packs an adapter for the model and raises ModelError if it does not fit; None if the
    model cannot have adapters.
    """
    if isinstance(model.native, NativeDecoder):
        return partial(NativeAdapter, model.native.weights.shape)
    if config.tensor_parallel_size > 1:
        return None
    from outrider.engine.torch_adapter import TorchAdapter

    assert model.model is not None
    return partial(
        TorchAdapter,
        model.model,
        native=model.native,
        device=model.device,
        is_deterministic=config.deterministic,
    )


def _pairs(settings: Sequence[str]) -> list[tuple[str, str]]:
    """Splits each `NAME=DIRECTORY`. Raises: ConfigError."""
    pairs = []
    for setting in settings:
        name, _, directory = setting.partition("=")
        if not (name and directory):
            raise ConfigError(f"model.adapters {setting!r} must be NAME=DIRECTORY")
        pairs.append((name, directory))
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError("model.adapters has two adapters of one name")
    return pairs
