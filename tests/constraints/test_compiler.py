"""Masks and positions in grammars depend only on the generated tokens, whatever drafts were examined."""

import json
import random
import threading
import time

import numpy as np
import pytest
from llguidance import LLParserLimits

from outrider.constraints import grammar
from outrider.constraints.compiler import (
    CONSTRAINT_VIOLATED,
    MASK_SECONDS,
    MAX_COMPILED,
    MAX_DEBT_SECONDS,
    MAX_OWN_DEBT_SECONDS,
    NUM_THREADS,
    CompiledGrammar,
    Debt,
    GrammarCompiler,
)
from outrider.errors import InvalidRequestError
from outrider.request import Constraint, ConstraintKind
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer
from tests.support.waiting import PATIENCE_SECONDS

TOKENIZER = tiny_tokenizer()
VOCAB_SIZE = 300
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json_schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Constraint(ConstraintKind.REGEX, "[a-c]{2,6}(x|yz)+"),
    "grammar": Constraint(ConstraintKind.GRAMMAR, 'start: "a" start "b" | "mid"\n'),
    "choice": Constraint(ConstraintKind.CHOICE, options=("the cat", 'the "dog"\n', "été")),
}
TAIL = "a? " * 3000 + '\na: "x" | b\nb: "y"?\n'
"""Part of a grammar. Where it begins, a mask would take too much work to compute."""
EXPLODING = Constraint(ConstraintKind.GRAMMAR, f'start: "qq" tail\ntail: {TAIL}')


@pytest.fixture
def compiler():
    return GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])


def allowed(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def random_answer(compiler, constraint, rng, most=60, end=EOS_TOKEN_ID):
    """Returns at most `most` random allowed tokens, the last of which may be end-of-text."""
    state, token_ids = compiler.start(constraint), []
    while len(token_ids) < most and end not in token_ids:
        token_ids.append(rng.choice(sorted(allowed(state.masks((), ())[0]))))
        state.commit(token_ids[-1:])
        assert not state.failure
    return token_ids


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_masks_along_drafts_are_those_of_committed_tokens(compiler, constraint):
    rng = random.Random(1)
    for _ in range(20):
        token_ids = tuple(random_answer(compiler, constraint, rng))
        expected = []
        state = compiler.start(constraint)
        for token_id in token_ids:
            expected.append(allowed(state.masks((), ())[0]))
            state.commit([token_id])
        known, assumed = (rng.randrange(len(token_ids)) for _ in range(2))
        known, assumed = min(known, assumed), max(known, assumed)
        state = compiler.start(constraint, token_ids[:known])
        for _ in range(2):  # looking ahead does not move the position
            masks = state.masks(token_ids[known:assumed], token_ids[assumed:-1])
            assert [allowed(mask) for mask in masks] == expected[assumed:]
            assert allowed(state.masks((), ())[0]) == expected[known]


def test_a_draft_that_is_not_allowed_ends_the_path_and_changes_nothing(compiler):
    state = compiler.start(CONSTRAINTS["choice"])
    first = allowed(state.masks((), ())[0])
    forbidden = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in first)
    masks = state.masks((), (forbidden, *sorted(first)[:1]))
    assert allowed(masks[0]) == first
    assert (masks[1:] == -1).all()  # never reached
    assert not state.failure
    assert allowed(state.masks((), ())[0]) == first


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_answers_are_what_was_asked_for(compiler, constraint):
    rng = random.Random(2)
    for _ in range(30):
        token_ids = random_answer(compiler, constraint, rng, most=400)
        if token_ids[-1] != EOS_TOKEN_ID:
            continue
        text = TOKENIZER.decode(token_ids[:-1])
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                found = json.loads(text)
                assert sorted(found) == ["age", "name"]
                assert len(found["name"]) <= 5
            case ConstraintKind.CHOICE:
                assert text in constraint.options
            case ConstraintKind.REGEX:
                assert set(text) <= set("abcxyz")
            case ConstraintKind.GRAMMAR:
                assert text.count("a") == text.count("b")
                assert "mid" in text


def test_after_the_end_only_end_of_text_follows_as_often_as_wanted(compiler):
    state = compiler.start(CONSTRAINTS["choice"])
    text = TOKENIZER.encode("the cat", add_special_tokens=False).ids
    masks = state.masks((), (*text, EOS_TOKEN_ID, EOS_TOKEN_ID, EOS_TOKEN_ID))
    assert [allowed(mask) for mask in masks[len(text) :]] == [{EOS_TOKEN_ID}] * 4
    state.commit([*text, EOS_TOKEN_ID, EOS_TOKEN_ID])
    assert not state.failure
    assert allowed(state.masks((), ())[0]) == {EOS_TOKEN_ID}
    state.commit([5])
    assert state.failure.startswith(CONSTRAINT_VIOLATED)


def test_a_committed_token_that_is_not_allowed_is_a_failure(compiler):
    state = compiler.start(CONSTRAINTS["regex"])
    state.commit(TOKENIZER.encode("zz", add_special_tokens=False).ids)
    assert state.failure == f"{CONSTRAINT_VIOLATED}: {TOKENIZER.token_to_id('z')}, after 0 others"
    assert (state.masks((), ()) == -1).all()
    assert state.forced_tokens() == []


@pytest.mark.parametrize("text", ["\x00", "\x01\x7f", "\\u0041", '\\"', "/a/i", "\t\r\n", "\u2028é😀", "%{}$"])
def test_a_choice_may_have_any_characters(compiler, text):
    state = compiler.start(Constraint(ConstraintKind.CHOICE, options=(text,)))
    state.commit([*TOKENIZER.encode(text, add_special_tokens=False).ids, EOS_TOKEN_ID])
    assert not state.failure


def test_forced_tokens_spell_what_alone_can_follow(compiler):
    state = compiler.start(CONSTRAINTS["choice"])
    state.commit(TOKENIZER.encode("the c", add_special_tokens=False).ids)
    assert TOKENIZER.decode(state.forced_tokens()).startswith("at")
    state.commit([*TOKENIZER.encode("at", add_special_tokens=False).ids, EOS_TOKEN_ID])
    assert state.forced_tokens() == []


def test_a_grammar_that_explodes_is_a_failure_of_its_sample_and_leaves_others_alone(compiler):
    state, other = compiler.start(EXPLODING), compiler.start(CONSTRAINTS["regex"])
    state.commit(letters("qq"))
    state.masks((), ())
    assert "too much work" in state.failure
    assert len(state.failure) < 500
    assert allowed(other.masks((), ())[0])


@pytest.fixture
def unlimited_time(monkeypatch):
    """Disables our time limit, whose effect depends on the machine. The library's limits, which count work, remain."""
    monkeypatch.setattr("outrider.constraints.compiler.MAX_DEBT_SECONDS", 1000.0)


@pytest.mark.usefixtures("unlimited_time")
def test_an_error_on_a_drafts_path_costs_the_draft_only(compiler):
    """The grammar explodes after "qqq", which the text can avoid."""
    lark = f'start: "ok" | "qqq" tail\ntail: {TAIL}'
    state = compiler.start(Constraint(ConstraintKind.GRAMMAR, lark))
    q, ok = (TOKENIZER.encode(text, add_special_tokens=False).ids for text in ("q", "ok"))
    masks = state.masks((), (*q, *q, *q))
    assert allowed(masks[0]) >= {q[0]}
    assert not masks[2].any()  # a text that reached this point would fail
    assert not state.failure
    state.commit(ok)
    assert not state.failure
    assert allowed(state.masks((), ())[0]) == {EOS_TOKEN_ID}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", "false", "cannot be compiled"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not fetch"),
        ("regex", "(ab", "unclosed group"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", f"start: {TAIL}", "Too many items"),
    ],
)
def test_what_cannot_be_compiled_says_why_and_where(compiler, kind, text, message):
    with pytest.raises(InvalidRequestError, match="cannot be compiled") as raised:
        compiler.prepare(Constraint(ConstraintKind(kind), text)).result()
    assert message in raised.value.message
    assert raised.value.field == f"sampling.{kind}"


def letters(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def test_what_is_decided_where_a_draft_had_no_mask_is_a_failure(compiler, monkeypatch):
    """The mask of such a row allows nothing, but a token is decided for it anyway, which may even fit the grammar."""
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(step_lexer_fuel=400, verbose_errors=False))
    endings = "|".join(f"[{letter}-z]{{1,{most}}}{most}" for most, letter in enumerate("abcde", 2))
    state, (q, z) = compiler.start(Constraint(ConstraintKind.REGEX, f"ok|q({endings})+")), letters("qz")
    masks = state.masks((), (q, z))
    assert [mask.any() for mask in masks] == [True, False, False]
    assert not state.failure  # the draft may be wrong
    state.commit([q, z])
    assert "too much work" in state.failure


@pytest.mark.usefixtures("unlimited_time")
def test_lexer_states_that_others_came_by_are_no_failure(compiler):
    """All samples of one grammar share a limit of 20,000 lexer states."""
    constraint = Constraint(ConstraintKind.REGEX, "(?s)([ab]*a[ab]{16}c)+")
    choices, rng = [letters("a")[0], letters("b")[0]], random.Random(1)
    token_ids, state = [], compiler.start(constraint)
    while not state.failure and len(token_ids) < 40_000:
        state.masks((), ())
        token_ids.append(rng.choice(choices))
        state.commit(token_ids[-1:])
        if state._beginning is not compiler.start(constraint)._beginning:
            break
    for known in ([], token_ids[:9]):
        other = compiler.start(constraint, known)
        assert other.masks((), ())[0].any()
        assert not other.failure


def test_one_text_that_is_long_has_quick_masks_or_fails(compiler):
    """The library looks far ahead if only one text can follow, but all samples together must not delay a step."""
    constraint = Constraint(ConstraintKind.REGEX, "(ab){200000}")
    states = [compiler.start(constraint) for _ in range(64)]
    for state in states:
        state.masks((), ())
        state.forced_tokens()
    assert "too much work" in states[-1].failure or not compiler.prepare(constraint).result().is_too_slow


def test_a_grammar_whose_masks_take_long_ends_all_that_follow_it(compiler):
    state, others = compiler.start(CONSTRAINTS["regex"]), [compiler.start(CONSTRAINTS["grammar"])]
    compiler.prepare(CONSTRAINTS["regex"]).result().spend(MAX_DEBT_SECONDS + 0.1, due=MASK_SECONDS)
    state.masks((), ())
    assert "more than 4 ms per mask" in state.failure
    assert state.forced_tokens() == []
    others[0].masks((), ())
    assert not others[0].failure
    compiler.prepare(CONSTRAINTS["regex"]).result().spend(0.0, due=1.0)  # other masks of this grammar were quick
    state = compiler.start(CONSTRAINTS["regex"])
    state.masks((), ())
    assert not state.failure


def test_of_more_than_are_kept_all_are_ready_soon():
    """A draft node asks for its grammars repeatedly, and keeps those that are compiled."""
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])
    waiting = [Constraint(ConstraintKind.REGEX, f"c{{{number + 1}}}") for number in range(MAX_COMPILED + 8)]
    kept, gate = [], threading.Barrier(NUM_THREADS + 1, timeout=PATIENCE_SECONDS)
    for _ in range(3):
        for _ in range(NUM_THREADS):
            compiler._threads.submit(lambda: (gate.wait(), gate.wait()))
        gate.wait()  # all that was asked for is compiled; nothing more until the next gate
        waiting, asked = [], waiting
        for constraint in asked:
            compiled = compiler.prepare(constraint)
            if compiled.done():
                kept.append(compiled)
            else:
                waiting.append(constraint)
        gate.wait()
    assert not waiting


def test_what_a_sample_follows_stays_compiled(compiler):
    state = compiler.start(CONSTRAINTS["grammar"])
    for number in range(MAX_COMPILED + 1):
        compiler.prepare(Constraint(ConstraintKind.REGEX, f"b{{{number + 1}}}"))
    assert compiler.prepare(CONSTRAINTS["grammar"]).result(10) is state._grammar


@pytest.mark.parametrize("constraint", [CONSTRAINTS["regex"], Constraint(ConstraintKind.REGEX, "(a")])
def test_a_constraint_is_compiled_once_whether_it_can_be_or_not(compiler, constraint):
    first = compiler.prepare(constraint)
    first.exception(10)
    assert compiler.prepare(constraint) is first


def test_a_grammar_whose_masks_were_slow_is_served_again_later():
    now = 0.0
    own, common = Debt(clock=lambda: now), Debt(clock=lambda: now)
    grammar = CompiledGrammar(lambda: None, own=own, common=common)
    grammar.spend(MASK_SECONDS, due=MASK_SECONDS)
    assert not grammar.is_too_slow
    grammar.spend(MAX_DEBT_SECONDS + 1.0, due=0.0)
    assert grammar.is_too_slow
    now = 49.0
    assert grammar.is_too_slow
    now = 51.0
    assert not grammar.is_too_slow


def test_grammars_owe_together_and_the_one_that_owes_little_goes_on():
    common = Debt()
    slow, other = (CompiledGrammar(lambda: None, own=Debt(), common=common) for _ in range(2))
    slow.spend(MAX_DEBT_SECONDS - 0.01, due=0.0)
    other.spend(MAX_OWN_DEBT_SECONDS - 0.01, due=0.0)
    assert not slow.is_too_slow
    other.spend(0.009, due=0.0)
    assert slow.is_too_slow
    assert not other.is_too_slow


def test_four_grammars_that_explode_end_before_others_have_waited_long():
    """The time of commits counts like that of masks. Each takes about 0.05 s here, and there are 64 samples."""
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])
    states = []
    for first in "qrst":
        grammar = Constraint(ConstraintKind.GRAMMAR, f'start: "{first}" tail\ntail: {TAIL}')
        states += [compiler.start(grammar) for _ in range(16)]
    started = time.thread_time()
    while states:
        for state in states:
            found = allowed(state.masks((), ())[0])
            if not state.failure:
                state.commit(sorted(found)[:1])
        states = [state for state in states if not state.failure]
    assert time.thread_time() - started < 10 * MAX_DEBT_SECONDS
