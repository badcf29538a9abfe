"""Settings of the sender's side that the receiver's side must be able to live with."""

from __future__ import annotations

import pytest

from outrider.kv_transfer.config import PROGRESS_SECONDS, KvTransferConfig


@pytest.mark.parametrize("progress_seconds", [0.2, 10.0, 600.0])
def test_a_patient_sender_shows_life_as_often_as_receivers_ask_for(progress_seconds):
    config = KvTransferConfig(progress_seconds=progress_seconds)
    assert config.keep_alive_seconds <= PROGRESS_SECONDS / 4
    assert config.keep_alive_seconds <= progress_seconds / 4
