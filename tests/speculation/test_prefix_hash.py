from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.prefix_hash import HashedTokens, prefix_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(TOKENS, st.lists(TOKENS, max_size=6), st.integers(1, 40), st.sets(st.integers(0, 6)))
def test_every_prefix_has_the_hash_of_its_tokens_however_it_grew(begin, pieces, history, asked_after):
    hashed = HashedTokens(begin, history=history)
    everything = list(begin)
    for index, piece in enumerate(pieces):
        if index in asked_after and everything:
            assert hashed.hash_at(len(everything) - 1) == prefix_hash(everything[:-1])
        hashed.extend(piece)
        everything += piece
    assert list(hashed.token_ids) == everything
    assert hashed.hash == prefix_hash(everything)
    for length in range(len(everything) + 1):
        assert hashed.hash_at(length) == prefix_hash(everything[:length])


def test_an_id_outside_uint32_is_refused_and_nothing_changes():
    hashed = HashedTokens([1, 2])
    with pytest.raises(OverflowError):
        hashed.extend([3, -1])
    assert len(hashed) == 2
    assert hashed.hash == prefix_hash([1, 2])


def test_a_prefix_that_does_not_exist_has_no_hash():
    with pytest.raises(ValueError, match="there is no prefix of 4 tokens"):
        HashedTokens([1, 2, 3]).hash_at(4)


def test_the_hash_that_the_documentation_names():
    assert prefix_hash([1, 2, 3]) == 0x6BBF7429332BEA48  # other clients compute it as docs/protocol.md says
