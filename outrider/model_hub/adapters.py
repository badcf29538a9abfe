"""The adapters (LoRA) that a node has: those of its settings, and those that are loaded while it runs. Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from outrider.engine.cpu_kernels.adapter import NativeAdapter
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.low_rank import LowRanks, PackedAdapter
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import (
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    ConfigError,
    InvalidRequestError,
    MismatchError,
    ModelError,
    NotAllowedError,
    NotFoundError,
)
from outrider.heap import trim_heap
from outrider.model_hub.adapter_files import read_adapter
from outrider.model_hub.config import ModelConfig
from outrider.request import Adapter

MAX_NAME_LENGTH = 128


class AdapterTable:
    """Adapters by name. Any thread may call it. Only one should load at a time, since each takes memory for the files.

    Running sequences keep their adapter, so unloading does not affect them.
    """

    def __init__(self, model: RunnableModel, *, model_name: str, config: ModelConfig) -> None:
        """Loads the adapters of `model.adapters`. Raises: ConfigError, ModelError."""
        self._pack = _packer(model, config)
        self._model_name = model_name
        self._root = Path(config.adapter_directory).expanduser().resolve() if config.adapter_directory else None
        self._max_bytes = config.adapter_memory_bytes
        self._by_name: dict[str, tuple[Adapter, PackedAdapter]] = {}
        self.adapters: tuple[Adapter, ...] = ()  # by name; read for every report
        # By fingerprint: those of all names, and those that only running sequences still use.
        self._packed: WeakValueDictionary[str, PackedAdapter] = WeakValueDictionary()
        self._changing = threading.Lock()
        if self._pack is None and (config.adapters or config.adapter_directory):
            raise ConfigError(
                f"adapters are not supported with model.{config.parallel_setting}; unset model.adapters and "
                "model.adapter_directory"
            )
        pairs = _pairs(config.adapters)
        self._fixed = frozenset(name for name, _ in pairs)
        for name, directory in pairs:
            try:
                self._load(name, Path(directory).expanduser())
            except CapacityError as error:
                raise ConfigError(f"model.adapters: {error.message}") from error

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that adapters may still take while the node runs."""
        return max(self._max_bytes - self._num_bytes, 0) if self._root is not None else 0

    def find(self, adapter: Adapter) -> PackedAdapter | None:
        """Returns an adapter, or None if the node does not have it, or another one of its name."""
        found = self._by_name.get(adapter.name)
        return found[1] if found is not None and found[0] == adapter else None

    def load(
        self, name: str, directory: str, fingerprint: str = "", has_ended: Callable[[], bool] = lambda: False
    ) -> Adapter:
        """Loads an adapter from a directory below `model.adapter_directory`. Does nothing if it is loaded already.

        `fingerprint`: the adapter's, if it is known. `has_ended`: whether nobody waits for the adapter any more.

        Raises: NotAllowedError without that setting, or for another directory; AlreadyRunningError;
        InvalidRequestError if there is no valid adapter; MismatchError if it has another fingerprint; AbortedError;
        CapacityError if it exceeds `model.adapter_memory_bytes`.
        """
        root = self._check_allowed()
        if not (1 <= len(name) <= MAX_NAME_LENGTH and name.isascii() and name.isprintable()):
            message = f"name must have 1 to {MAX_NAME_LENGTH} characters, all printable ASCII"
            raise InvalidRequestError(message, field="name")
        path = root if "\0" in directory else Path(os.path.realpath(root / directory))
        if not path.is_relative_to(root) or path == root:
            message = f"directory {directory!r} is not below model.adapter_directory"
            raise NotAllowedError(message, reason="ADAPTER_DIRECTORY")
        try:
            return self._load(name, path, root, fingerprint=fingerprint, has_ended=has_ended)
        except ModelError as error:
            message = error.message.replace(str(path), directory)
            raise InvalidRequestError(message, field="directory", reason="BAD_ADAPTER") from error
        finally:
            trim_heap()  # the files took memory, too

    def unload(self, name: str, fingerprint: str = "") -> None:
        """Unloads an adapter, whatever its fingerprint if that is empty.

        Raises: NotFoundError; NotAllowedError for an adapter of `model.adapters`.
        """
        with self._changing:
            found = self._by_name.get(name)
            if found is None or fingerprint not in ("", found[0].fingerprint):
                raise NotFoundError(f"there is no adapter {name!r}", reason="ADAPTER_NOT_FOUND")
            if name in self._fixed:
                message = f"adapter {name!r} cannot be unloaded while the node runs: it is one of model.adapters"
                raise NotAllowedError(message, reason="ADAPTERS_ARE_FIXED")
            del self._by_name[name]
            self._list()

    def _load(
        self,
        name: str,
        directory: Path,
        root: Path | None = None,
        *,
        fingerprint: str = "",
        has_ended: Callable[[], bool] = lambda: False,
    ) -> Adapter:
        assert self._pack is not None, "the settings of adapters were refused"
        if has_ended():
            raise AbortedError(f"the call that loads the adapter {name!r} has ended")
        files = read_adapter(directory, root=root, max_bytes=self._max_bytes)
        adapter = Adapter(name, files.fingerprint)
        if fingerprint not in ("", adapter.fingerprint):
            message = f"the directory has the adapter {adapter}, not {fingerprint[:12]}"
            raise MismatchError(message, reason="ADAPTER_MISMATCH")
        with self._changing:
            found = self._by_name.get(name)
            if found is not None and found[0] == adapter:
                return adapter
            if found is not None or name == self._model_name:
                what = "the model has" if found is None else "another adapter has"
                raise AlreadyRunningError(f"{what} the name {name!r}", reason="ADAPTER_EXISTS")
            packed = self._packed.get(adapter.fingerprint)
            if packed is None:
                try:
                    self._check_room(name, files.num_bytes)
                    packed = self._pack(files.parts)
                except CapacityError:
                    del files  # which the traceback would keep
                    raise
                except ModelError as error:
                    raise ModelError(f"{directory} does not fit {self._model_name}: {error.message}") from error
                self._check_room(name, packed.num_bytes)  # with padding
                self._packed[adapter.fingerprint] = packed
            if has_ended():
                raise AbortedError(f"the call that loads the adapter {name!r} has ended")
            self._by_name[name] = adapter, packed
            self._list()
        return adapter

    def _list(self) -> None:
        self.adapters = tuple(self._by_name[name][0] for name in sorted(self._by_name))

    @property
    def _num_bytes(self) -> int:
        return sum(packed.num_bytes for packed in self._packed.values())

    def _check_room(self, name: str, num_bytes: int) -> None:
        if (used := self._num_bytes) + num_bytes > self._max_bytes:
            message = (
                f"adapter {name!r} needs {num_bytes:,} bytes, and others use {used:,} of {self._max_bytes:,}: "
                "unload one, or set model.adapter_memory_bytes higher"
            )
            raise CapacityError(message, reason="ADAPTER_MEMORY")

    def _check_allowed(self) -> Path:
        if self._root is None:
            message = "adapters cannot be loaded or unloaded while the node runs: set model.adapter_directory"
            raise NotAllowedError(message, reason="ADAPTERS_ARE_FIXED")
        return self._root


def _packer(model: RunnableModel, config: ModelConfig) -> Callable[[LowRanks], PackedAdapter] | None:
    """Returns a function that packs an adapter for the model and raises ModelError if it does not fit; None if the
    model cannot have adapters.
    """
    if config.num_ranks > 1:
        return None
    if isinstance(model.native, NativeDecoder):
        return partial(NativeAdapter, model.native.weights.shape)
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
