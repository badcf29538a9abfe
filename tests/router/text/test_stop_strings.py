"""Stop strings are found across token boundaries, and text is cut as router.proto says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.model_hub.checkpoint_text import read_text
from router.text.answer_text import AnswerText
from router.text.tokenizer import Tokenizer
from tests.support.router_fakes import fake_tokenizer_files

TOKENIZER = Tokenizer(read_text(fake_tokenizer_files()))


class Pieces:
    """A detokenizer whose tokens are pieces of text."""

    is_mid_character = False

    def append(self, piece):
        return piece

    def finish(self):
        return ""


def feed(pieces, strings, *, include_match=False):
    """Returns (the released text, the matched stop string, the number of pieces read)."""
    text = AnswerText(Pieces(), strings, include_match=include_match)
    released = ""
    for num_read, piece in enumerate(pieces, start=1):
        released += text.append(piece)
        if text.matched_stop_string is not None:
            return released, text.matched_stop_string, num_read
    return released + text.finish(), None, len(pieces)


def test_an_end_that_could_begin_a_stop_string_is_held_back_and_no_more():
    text = AnswerText(Pieces(), ["STOP"])
    assert text.append("go ST") == "go "
    assert text.append("ST") == "ST"
    assert text.append("AY") == "STAY"
    assert text.append("S") == ""
    assert text.finish() == "S"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=24),
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include_match=st.booleans(),
)
def test_any_split_agrees_with_looking_at_the_whole_text(text, strings, cuts, include_match):
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    released, matched, num_read = feed(pieces, strings, include_match=include_match)
    seen = "".join(pieces[:num_read])
    for earlier in range(num_read - 1 if matched else num_read):
        assert not any(string in "".join(pieces[: earlier + 1]) for string in strings), "found late"
    if matched is None:
        assert released == text
    else:
        begin = min(seen.find(string) for string in strings if string in seen)
        assert released == seen[: begin + len(matched) * include_match]
        assert matched == next(string for string in strings if seen.startswith(string, begin))


def answer(data, *, stops=(), min_tokens=0):
    """Returns (the text, the matched stop string, the number of tokens read) of a byte-level answer."""
    text = AnswerText(TOKENIZER.detokenizer(skip_special_tokens=True), stops, min_tokens=min_tokens)
    released = ""
    for num_read, byte in enumerate(data, start=1):
        released += text.append(byte)
        if text.matched_stop_string is not None:
            return released, text.matched_stop_string, num_read
    return released + text.finish(), None, len(data)


@pytest.mark.parametrize(
    ("data", "stop", "min_tokens", "expected"),
    [
        (b"aXbXc", "X", 0, ("a", "X", 2)),
        (b"aXbXc", "X", 2, ("aXb", "X", 4)),
        (b"aXXc", "XX", 2, ("aXXc", None, 4)),  # a match would begin in the first two tokens
        (b"aXXXc", "XX", 2, ("aX", "XX", 4)),
        (b"XXXX", "X", 4, ("XXXX", None, 4)),
    ],
)
def test_no_stop_string_begins_in_the_text_of_the_first_min_tokens(data, stop, min_tokens, expected):
    assert answer(data, stops=[stop], min_tokens=min_tokens) == expected


def test_a_character_that_the_first_min_tokens_begin_belongs_to_them():
    data = "é".encode() + "é".encode()  # four tokens
    assert answer(data, stops=["é"], min_tokens=1) == ("é", "é", 4)
    assert answer(data, stops=["é"], min_tokens=2) == ("é", "é", 4)
    assert answer(data, stops=["é"], min_tokens=3) == ("éé", None, 4)
