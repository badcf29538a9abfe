from __future__ import annotations

import os

import pytest

from outrider.errors import ConfigError
from outrider.training.answer_files import AnswerWriter, KeptAnswer, read_answers


def answer(number, size=20):
    return KeptAnswer([1, 2, number], [number] * size, 0.5, "chat")


def write(folder, answers, *, max_bytes=1 << 20):
    writer = AnswerWriter(folder, max_bytes=max_bytes)
    for each in answers:
        writer.append(each)
    writer.close()


def test_what_is_written_is_read_again_in_order(tmp_path):
    answers = [answer(number) for number in range(5)]
    write(tmp_path / "kept", answers)
    assert list(read_answers(tmp_path / "kept")) == answers


def test_a_line_that_a_killed_writer_left_is_passed_over(tmp_path):
    write(tmp_path, [answer(1)])
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + answer(2).to_line()[:-9])
    assert list(read_answers(tmp_path)) == [answer(1)]


@pytest.mark.parametrize("line", ['{"prompt": [1]}', "[]", "nonsense", '{"prompt": 3, "response": [1]}'])
def test_a_line_that_is_no_answer_is_named(tmp_path, line):
    write(tmp_path, [answer(1)])
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_answers(tmp_path))


def test_a_file_that_a_node_removes_meanwhile_is_passed_over(tmp_path):
    for number in range(2):
        write(tmp_path, [answer(number)])
    answers = read_answers(tmp_path)
    assert next(answers) == answer(0)
    sorted(tmp_path.iterdir())[1].unlink()
    assert list(answers) == []


def test_after_a_full_disk_answers_go_to_another_file(tmp_path, monkeypatch):
    writer, write_all, num_written = AnswerWriter(tmp_path, max_bytes=1 << 20), os.write, []

    def write_half(descriptor, line):
        num_written.append(len(line))
        return write_all(descriptor, line[:9] if len(num_written) == 2 else line)

    monkeypatch.setattr(os, "write", write_half)
    writer.append(answer(1))
    with pytest.raises(OSError, match="No space"):
        writer.append(answer(2))
    writer.append(answer(3))
    writer.close()
    assert list(read_answers(tmp_path)) == [answer(1), answer(3)]
