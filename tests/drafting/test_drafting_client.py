"""The client for other engines: texts in, drafts out."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from outrider.drafting import client as client_module
from outrider.speculation.draft_stream import DraftStatus
from tests.decode_node.drafting.streams import Impostor, draft_node, unused_port
from tests.drafting.books import answer_to
from tests.support.fake_head import FakeHead
from tests.support.scripted_proposer import ScriptedProposer
from tests.support.waiting import PATIENCE_SECONDS, wait_for

TEXT = [1, 2, 3, 4, 5, 6, 7, 8] * 20
OTHER = [11, 12, 13, 14, 15] * 20


def array(text):
    return np.asarray(text, dtype=np.int32)


def expect(client, texts, expected, *, num_tokens=3):
    """Proposes until the drafts are these: on a busy machine, answers come after a call's budget. An earlier answer's
    rest may come before them.
    """
    wait_for(lambda: client.propose(texts, num_tokens=num_tokens) == expected)


def test_growing_texts_get_their_drafts_whatever_their_order(nodes):
    proposer = ScriptedProposer([TEXT, OTHER])
    client = nodes.connected(nodes.serve(draft_node(proposer)))
    expect(client, [array(TEXT[:20]), array(OTHER[:30])], [TEXT[20:23], OTHER[30:33]])
    expect(client, [array(OTHER[:32]), array(TEXT[:24])], [OTHER[32:35], TEXT[24:27]])
    assert client.status().num_texts == 2
    assert len({request.sequence_id for request in proposer.requests}) == 2


def test_lists_serve_as_well_as_arrays(nodes):
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    expect(client, [TEXT[:20]], [TEXT[20:23]])


def test_equal_texts_share_their_drafts_until_they_differ(nodes):
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer([TEXT, [*TEXT[:20], *OTHER]]))))
    expect(client, [array(TEXT[:20]), array(TEXT[:20])], [TEXT[20:23], TEXT[20:23]])
    assert client.status().num_texts == 1
    expect(client, [array(TEXT[:21]), array([*TEXT[:20], OTHER[0]])], [TEXT[21:24], OTHER[1:4]])
    assert client.status().num_texts == 2


def test_a_text_that_no_call_has_any_more_is_forgotten_by_the_node_too(nodes, monkeypatch):
    proposer = ScriptedProposer([TEXT, OTHER])
    client = nodes.connected(nodes.serve(draft_node(proposer)))
    expect(client, [array(TEXT[:20]), array(OTHER[:20])], [TEXT[20:23], OTHER[20:23]])
    monkeypatch.setattr(client_module, "FORGET_SECONDS", 0.0)
    monkeypatch.setattr(client_module, "FORGET_STEPS", 0.0)
    expect(client, [array(OTHER[:21])], [OTHER[21:24]])
    assert client.status().num_texts == 1
    wait_for(lambda: len(proposer.forgotten) == 1)


def test_texts_of_an_engine_without_calls_are_forgotten(nodes, monkeypatch):
    for name in ("FORGET_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(client_module, name, 0.05)
    proposer = ScriptedProposer([TEXT])
    client = nodes.connected(nodes.serve(draft_node(proposer)))
    client.propose([array(TEXT[:20])], num_tokens=3)
    wait_for(lambda: client.status().num_texts == 0 and len(proposer.forgotten) == 1)


def test_a_text_behind_an_equal_one_of_the_batch_gets_no_wrong_draft(nodes):
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    for length in range(20, 25):
        texts = [array(TEXT[:length]), array(TEXT[: length + 1])]
        wait_for(lambda texts=texts: client.propose(texts, num_tokens=3)[1])
        behind, _ = client.propose(texts, num_tokens=3)
        assert behind == TEXT[length : length + len(behind)]


def test_a_stream_that_fails_is_opened_again(nodes, monkeypatch, caplog):
    from outrider.drafting import link

    check, calls = link.check_fits, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise AttributeError("a bug")
        check(*arguments)

    monkeypatch.setattr(link, "check_fits", fail_once)
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    expect(client, [array(TEXT[:20])], [TEXT[20:23]])
    assert "failed" in caplog.text
    assert "a bug" in caplog.text


def test_a_logger_that_fails_ends_no_stream_for_good(nodes):
    class Failing(logging.Handler):
        num_left = 3

        def emit(self, _record):
            self.num_left -= 1
            if self.num_left >= 0:
                raise RuntimeError("the log collector is away")

    logger = logging.getLogger("failing")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := Failing())
    nodes.client(unused_port(), logger=logger)
    wait_for(lambda: handler.num_left < 0)


def test_texts_that_cannot_be_drafted_are_not_sent(nodes):
    proposer = ScriptedProposer([TEXT])
    client = nodes.connected(nodes.serve(draft_node(proposer)), max_model_len=50)
    impossible = [[1, 100], [-1 % 2**32], TEXT[:50], []]
    assert client.propose(impossible, num_tokens=3) == [[], [], [], []]
    assert client.propose([array([3, -1])], num_tokens=3) == [[]]
    expect(client, [TEXT[:48]], [TEXT[48:50]], num_tokens=9)
    assert {tuple(request.token_ids) for request in proposer.requests} == {tuple(TEXT[:48])}
    with pytest.raises(OverflowError):
        client.propose([[-1]], num_tokens=3)


def test_no_node_costs_no_wait(nodes):
    client = nodes.client(unused_port(), max_wait_seconds=PATIENCE_SECONDS)
    client.propose([array(TEXT[:20])], num_tokens=3)
    started = time.thread_time()
    began = time.monotonic()
    for length in range(21, 121):
        assert client.propose([array(TEXT[:length])], num_tokens=3) == [[]]
    assert time.thread_time() - started < 0.2
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_a_call_waits_at_most_a_share_of_the_step_for_a_node_that_does_not_answer(nodes, monkeypatch):
    client = nodes.connected(nodes.serve(Impostor()), max_wait_seconds=PATIENCE_SECONDS)
    waits = []
    take = client._streams.take
    monkeypatch.setattr(
        client._streams, "take", lambda ids, wait_seconds: waits.append(wait_seconds) or take(ids, wait_seconds=0.0)
    )
    client.propose([array(TEXT[:20])], num_tokens=3)
    assert waits == [0.0]  # no step is known
    known = next(iter(client._texts))
    known.seen_at -= 10.0
    client.propose([array(TEXT[:21])], num_tokens=3)
    assert waits[1] == pytest.approx(2.0, rel=0.2)
    client.propose([array(TEXT[:21])], num_tokens=3, max_wait_seconds=0.001)
    assert waits[2] == 0.001


def test_a_node_that_comes_back_drafts_again(nodes):
    port = nodes.serve(draft_node(ScriptedProposer([TEXT])))
    client = nodes.connected(port)
    expect(client, [array(TEXT[:20])], [TEXT[20:23]])
    nodes.end(port)
    wait_for(lambda: not client.status().connected)
    client.propose([array(TEXT[:21])], num_tokens=3)
    nodes.serve(draft_node(ScriptedProposer([TEXT])), port)
    expect(client, [array(TEXT[:40])], [TEXT[40:43]])


@pytest.mark.parametrize("proposed_ids", [(7, 100), (7,) * 40], ids=["an id outside the vocabulary", "too many tokens"])
def test_invalid_answers_are_dropped(nodes, proposed_ids):
    answered = threading.Event()

    def answer(update):
        answered.set()
        return [] if update.closed else [answer_to(update, *proposed_ids)]

    client = nodes.connected(nodes.serve(Impostor(answer)))
    client.propose([array(TEXT[:20])], num_tokens=3)
    assert answered.wait(PATIENCE_SECONDS)
    wait_for(lambda: client._streams._book.counters.num_quarantined)
    assert client.propose([array(TEXT[:20])], num_tokens=3) == [[]]


def test_a_node_with_another_vocabulary_is_refused(nodes):
    proposer = ScriptedProposer([TEXT])
    proposer.info = type(proposer.info)(name="scripted", vocabulary_fingerprint="theirs")
    client = nodes.client(nodes.serve(draft_node(proposer)))
    wait_for(lambda: client.status().refused)
    assert "vocabulary" in next(iter(client.status().refused.values()))


def test_a_head_is_refused_since_no_hidden_states_are_sent(nodes):
    client = nodes.client(nodes.serve(draft_node(FakeHead([TEXT]))))
    wait_for(lambda: client.status().refused)
    assert "computes none" in next(iter(client.status().refused.values()))
    assert "ngram, suffix or draft_model" in next(iter(client.status().refused.values()))


def test_a_closed_client_has_no_drafts(nodes):
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer([TEXT]))))
    client.close()
    client.close()
    assert not client._thread.is_alive()
    assert client.propose([array(TEXT[:20])], num_tokens=3) == [[]]


def test_threads_propose_at_a_time(nodes):
    texts = [[number, *TEXT] for number in range(11, 15)]
    client = nodes.connected(nodes.serve(draft_node(ScriptedProposer(texts))))
    done = []

    def grow(text):
        for length in range(20, 30):
            expect(client, [array(text[:length])], [text[length : length + 3]])
        done.append(text)

    threads = [threading.Thread(target=grow, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len(done) == len(texts)
    assert client.status().num_texts == len(texts)


def test_a_full_node_is_not_asked_at_once_again(nodes):
    def refuse(update):
        return [] if update.closed else [answer_to(update, status=DraftStatus.NO_ROOM)]

    impostor = Impostor(refuse)
    client = nodes.connected(nodes.serve(impostor))
    client.propose([array(TEXT[:20])], num_tokens=3)
    wait_for(lambda: impostor.messages)
    for length in range(21, 60):
        assert client.propose([array(TEXT[:length])], num_tokens=3) == [[]]
    assert sum(not update.closed for message in impostor.messages for update in message) <= 3
