from __future__ import annotations

import numpy as np

from outrider.drafting.known_texts import MAX_GROWTH, KnownText, KnownTexts


def ids(*values):
    return np.asarray(values, dtype=np.uint32)


def known(texts, number, *values):
    text = KnownText(number, (0, 0), 0, 0.0)
    texts.put(text, ids(*values))
    return text


def test_a_text_is_found_by_what_it_begins_with():
    texts = KnownTexts()
    one, other = known(texts, 1, 5, 6, 7), known(texts, 2, 9, 6, 7)
    assert texts.find(ids(5, 6, 7)) is one
    assert texts.find(ids(9, 6, 7, 1, 2)) is other
    assert texts.find(ids(8, 6, 7, 1)) is None
    assert texts.find(ids(5, 6)) is None


def test_the_longest_beginning_wins():
    texts = KnownTexts()
    _, longer = known(texts, 1, 5, 6), known(texts, 2, 5, 6, 7)
    assert texts.find(ids(5, 6, 7, 8)) is longer


def test_a_text_that_has_grown_is_known_by_its_new_tokens_only():
    texts = KnownTexts()
    text = known(texts, 1, 5, 6)
    texts.put(text, ids(5, 6, 7))
    assert texts.find(ids(5, 6, 8)) is None
    assert texts.find(ids(5, 6, 7, 8)) is text
    assert text.length == 3


def test_a_text_grows_by_a_limited_number_of_tokens():
    texts = KnownTexts()
    text = known(texts, 1, 5)
    assert texts.find(ids(5, *[1] * MAX_GROWTH)) is text
    assert texts.find(ids(5, *[1] * (MAX_GROWTH + 1))) is None


def test_removing_a_text_leaves_the_one_that_has_taken_its_place():
    texts = KnownTexts()
    before, after = known(texts, 1, 5, 6), known(texts, 2, 5, 6)
    texts.remove(before)
    assert texts.find(ids(5, 6)) is after
    texts.remove(after)
    assert list(texts) == []
