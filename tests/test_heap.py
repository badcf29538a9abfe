"""Garbage collection is paused as long as any thread asks for it."""

from __future__ import annotations

import gc
import threading

import pytest

from outrider.heap import collection_paused


def test_collection_is_paused_until_the_last_thread_has_left():
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with collection_paused():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with collection_paused():
        thread.start()
        assert entered.wait(10)
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join(10)
    assert gc.isenabled()


def test_an_error_ends_the_pause():
    @collection_paused()
    def fails():
        assert not gc.isenabled()
        raise ValueError("text")

    with pytest.raises(ValueError, match="text"):
        fails()
    assert gc.isenabled()
