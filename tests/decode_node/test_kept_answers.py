"""`decode_node.keep_answers`: a thread of its own stores the answers of a node."""

from __future__ import annotations

import threading

import pytest

from decode_node.kept_answers import MAX_WAITING, KeptAnswers
from outrider.errors import ConfigError
from outrider.training.answer_files import AnswerWriter, KeptAnswer, read_answers
from tests.decode_node.tiny_node import PROMPT, generate


def test_a_disk_that_is_behind_loses_answers_and_holds_nobody_up(tmp_path, monkeypatch):
    is_released, append = threading.Event(), AnswerWriter.append

    def wait(writer, answer):
        assert is_released.wait(60.0)
        append(writer, answer)

    monkeypatch.setattr(AnswerWriter, "append", wait)
    kept = KeptAnswers(tmp_path, max_bytes=1 << 22)
    for _ in range(MAX_WAITING + 10):
        kept.keep([1, 2, 3], prompt_length=2, temperature=0.0)
    assert 9 <= kept.num_dropped <= 10  # the writer may hold one already
    is_released.set()
    kept.close()
    assert len(list(read_answers(tmp_path))) == MAX_WAITING + 10 - kept.num_dropped


def test_a_disk_that_is_full_is_counted_and_tried_again(tmp_path, monkeypatch):
    append, has_failed = AnswerWriter.append, threading.Event()

    def fail_once(writer, answer):
        if not has_failed.is_set():
            has_failed.set()
            raise OSError(28, "No space left on device")
        append(writer, answer)

    monkeypatch.setattr(AnswerWriter, "append", fail_once)
    kept = KeptAnswers(tmp_path, max_bytes=1 << 20)
    for number in range(2):
        kept.keep([1, 2, number], prompt_length=2, temperature=0.0)
    kept.close()
    assert kept.num_dropped == 1
    assert [each.response for each in read_answers(tmp_path)] == [[1]]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"decode_node\.keep_answers"):
        KeptAnswers(tmp_path / "file" / "kept", max_bytes=1 << 20)


def test_a_node_keeps_what_it_has_answered_with_its_prompt(make_node, tmp_path):
    node = make_node()
    node.groups.kept_answers = KeptAnswers(tmp_path, max_bytes=1 << 20)
    answer = generate(node, sampling={"temperature": 0.8})
    node.groups.kept_answers.close()
    assert list(read_answers(tmp_path)) == [KeptAnswer(list(PROMPT), answer, 0.8, "traffic")]
