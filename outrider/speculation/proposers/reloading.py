"""A proposer whose model is replaced when its folder changes, while it drafts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from outrider.errors import ConfigError
from outrider.speculation.proposers.base import Proposal, ProposalRequest, Proposer, ProposerInfo

LOOK_SECONDS = 1.0
"""Between two looks at the folder. A change is loaded once two looks have found the same."""

Stamp = tuple[tuple[str, int, int, int], ...]

Loaded = TypeVar("Loaded")

OnReload = Callable[[Path, Exception | None], None]
"""on_reload(folder, error): the model that is there now is in use, or is refused for this reason."""


def no_report(_folder: Path, _error: Exception | None) -> None:
    """Tells nobody."""


class ReloadingProposer(Generic[Loaded]):
    """A `Proposer` over the newest model of a folder. One owner thread.

    A thread of its own reads the files; the owner's thread builds the proposer, between two calls. The new one knows
    no sequence and learns each from its next request. A model that cannot be loaded, or that needs other features or
    another vocabulary, is refused, and the old one goes on.
    """

    def __init__(
        self,
        folder: Path,
        *,
        load: Callable[[], Loaded],
        build: Callable[[Loaded], Proposer],
        on_reload: OnReload = no_report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads the first model. Raises: as `load` and `build`."""
        self._folder = folder
        self._load = load
        self._build = build
        self._on_reload = on_reload
        self._clock = clock
        self._tried = self._seen = _stamp_of(folder)
        self._proposer = build(load())
        self._num_wasted_before = 0  # of proposers that were replaced
        self._loading: Future[Loaded] | None = None
        self._look_at = clock() + LOOK_SECONDS

    @property
    def info(self) -> ProposerInfo:
        return self._proposer.info

    @property
    def num_wasted_tokens(self) -> int:
        return self._num_wasted_before + self._proposer.num_wasted_tokens

    def propose(self, requests: Sequence[ProposalRequest]) -> list[Proposal]:
        self._look()
        return self._proposer.propose(requests)

    def forget(self, sequence_id: int) -> None:
        self._proposer.forget(sequence_id)

    def _look(self) -> None:
        if self._loading is not None:
            if self._loading.done():
                loading, self._loading = self._loading, None
                self._replace(loading)
            return
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        before, self._seen = self._seen, _stamp_of(self._folder)
        if self._seen and self._seen == before and self._seen != self._tried:
            self._tried = self._seen
            self._loading = Future()
            threading.Thread(target=self._work, args=(self._loading,), name="load head", daemon=True).start()

    def _work(self, loading: Future[Loaded]) -> None:
        import torch

        torch.set_num_threads(1)  # of this thread: it must not take processors from steps (see `EngineThread`)
        try:
            loading.set_result(self._load())
        except Exception as error:  # noqa: BLE001 the border of the thread: the owner's has it
            loading.set_exception(error)

    def _replace(self, loading: Future[Loaded]) -> None:
        if _stamp_of(self._folder) != self._tried:
            self._tried = ()  # it changed while it was read
            return
        try:
            proposer = self._build(loading.result())
            _check_fits(proposer.info, self.info)
        except Exception as error:  # noqa: BLE001 whatever is in the folder, the old model goes on
            self._on_reload(self._folder, error)
            return
        self._num_wasted_before = self.num_wasted_tokens
        self._proposer = proposer
        self._on_reload(self._folder, None)


def _check_fits(new: ProposerInfo, old: ProposerInfo) -> None:
    """What decode nodes were told must stay. Raises: ConfigError that names what differs."""
    for name in ("name", "vocabulary_fingerprint", "features", "can_look_ahead", "num_extra_tokens"):
        ours, theirs = getattr(old, name), getattr(new, name)
        if ours != theirs:
            raise ConfigError(f"its {name} is {theirs}, that of the one in use {ours}: restart the nodes to change it")


def _stamp_of(folder: Path) -> Stamp:
    """Of its configuration and weights: name, inode, size, time. Empty where they cannot be read."""
    try:
        paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors")]
        states = [(path.name, path.stat()) for path in paths]
    except OSError:
        return ()
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
