"""A proposer whose model's folder changes under it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ModelError
from outrider.speculation.proposers.base import ProposalRequest
from outrider.speculation.proposers.reloading import LOOK_SECONDS, ReloadingProposer
from tests.support.fake_clock import FakeClock
from tests.support.fake_head import FEATURES
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.waiting import PATIENCE_SECONDS

REQUEST = ProposalRequest(1, (1, 2), num_wanted=1)


class Folder:
    """A model is a file with the token that it proposes after 1, 2. Loading waits for `gate`."""

    def __init__(self, path: Path) -> None:
        self.path = path / "current"
        self.clock = FakeClock(100.0)
        self.gate = threading.Event()
        self.gate.set()
        self.loaded_by: list[threading.Thread] = []
        self.news: list[str] = []
        self.changes: dict = {}  # of the next proposer's info
        self._names = iter(range(100))
        self.put("3")

    def put(self, text: str) -> None:
        """A whole new folder in the place of the old one."""
        new = self.path.with_name(f"model-{next(self._names)}")
        new.mkdir()
        (new / "model.safetensors").write_text(text)
        link = self.path.with_name("new-link")
        link.symlink_to(new)
        link.replace(self.path)

    def load(self) -> str:
        self.loaded_by.append(threading.current_thread())
        assert self.gate.wait(PATIENCE_SECONDS)
        text = (self.path / "model.safetensors").read_text()
        if text == "broken":
            raise ModelError("it is broken")
        return text

    def build(self, text: str) -> ScriptedProposer:
        proposer = ScriptedProposer([(1, 2, int(text))])
        proposer.info = replace(proposer.info, features=FEATURES, **self.changes)
        return proposer

    def proposer(self) -> ReloadingProposer[str]:
        return ReloadingProposer(
            self.path,
            load=self.load,
            build=self.build,
            on_reload=lambda _folder, error: self.news.append(str(error or "in use")),
            clock=self.clock,
        )

    def proposed(self, proposer: ReloadingProposer[str], num_looks: int = 3) -> int:
        """After so many looks at the folder, and what they have led to."""
        for _ in range(num_looks):
            self.clock.advance(LOOK_SECONDS)
            proposer.propose([])
            for thread in self.loaded_by[1:]:
                thread.join(PATIENCE_SECONDS if self.gate.is_set() else 0.0)
        (proposal,) = proposer.propose([REQUEST])
        return proposal.tree.token_ids[0]


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


def test_a_new_model_is_used_without_a_restart(folder):
    proposer = folder.proposer()
    assert folder.proposed(proposer) == 3
    for text in ("4", "5"):
        folder.put(text)
        assert folder.proposed(proposer) == int(text)
    assert folder.news == ["in use", "in use"]
    assert len(folder.loaded_by) == 3


def test_drafting_goes_on_while_a_new_model_is_read_by_another_thread(folder):
    proposer = folder.proposer()
    folder.gate.clear()
    folder.put("4")
    assert folder.proposed(proposer) == 3
    assert folder.loaded_by[0] is threading.current_thread()
    assert folder.loaded_by[1] is not threading.current_thread()
    folder.gate.set()
    assert folder.proposed(proposer) == 4


def test_a_folder_that_changes_between_two_looks_is_not_read_yet(folder):
    proposer = folder.proposer()
    for text in ("4", "5", "6"):
        folder.put(text)
        assert folder.proposed(proposer, num_looks=1) == 3
    assert len(folder.loaded_by) == 1
    assert folder.proposed(proposer) == 6


def test_what_changes_while_it_is_read_is_read_again(folder):
    proposer = folder.proposer()
    folder.gate.clear()
    folder.put("4")
    folder.proposed(proposer)
    folder.put("5")
    folder.gate.set()
    assert folder.proposed(proposer, num_looks=6) == 5
    assert folder.news == ["in use"]
    assert len(folder.loaded_by) == 3


@pytest.mark.parametrize("does_it_look", [True, False])
def test_it_looks_once_a_second_at_most(folder, does_it_look, monkeypatch):
    proposer = folder.proposer()
    looks = []
    monkeypatch.setattr("outrider.speculation.proposers.reloading._stamp_of", lambda folder: looks.append(folder) or ())
    folder.clock.advance(LOOK_SECONDS if does_it_look else LOOK_SECONDS / 2)
    for _ in range(5):
        proposer.propose([])
    assert len(looks) == does_it_look


def test_a_broken_model_is_refused_once_and_the_old_one_goes_on(folder):
    proposer = folder.proposer()
    folder.put("broken")
    assert folder.proposed(proposer, num_looks=6) == 3
    assert folder.news == ["it is broken"]
    folder.put("4")
    assert folder.proposed(proposer) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"features": replace(FEATURES, fingerprint="0" * 64)},
        {"features": None},
        {"vocabulary_fingerprint": "other"},
        {"name": "other"},
        {"can_look_ahead": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_that_does_not_fit_what_decode_nodes_were_told_is_refused(folder, changes):
    proposer = folder.proposer()
    folder.changes = changes
    folder.put("4")
    assert folder.proposed(proposer) == 3
    (news,) = folder.news
    assert next(iter(changes)) in news
    assert proposer.info.features == FEATURES


def test_a_folder_that_is_gone_costs_nothing_until_it_is_back(folder):
    proposer = folder.proposer()
    gone = folder.path.with_name("gone")
    folder.path.replace(gone)
    assert folder.proposed(proposer) == 3
    assert len(folder.loaded_by) == 1
    folder.put("4")
    assert folder.proposed(proposer) == 4


def test_wasted_tokens_are_counted_on(folder):
    proposer = folder.proposer()
    proposer._proposer.num_wasted_tokens = 7
    folder.put("4")
    folder.proposed(proposer)
    proposer._proposer.num_wasted_tokens = 2
    assert proposer.num_wasted_tokens == 9
