"""Constrained answers of the default model: they satisfy the constraint, and are the same with drafts and without."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from outrider.client import ChatMessage
from outrider.errors import InvalidRequestError
from outrider.request import FinishReason
from tests.e2e.random_requests import REQUEST_SECONDS, assert_exact
from tests.e2e.random_schemas import random_schema

pytestmark = pytest.mark.real_model

QUESTIONS = (
    "Describe a person as JSON.",
    "Give me an example record of a shop.",
    "Write data about a city in France.",
    "Fill in the form for a new book.",
)
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "occupation_title": {"enum": ["software engineer", "gardener", "pilot"]},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["first_name", "occupation_title", "age_in_years"],
    "additionalProperties": False,
}


def ask(cluster, text, **options):
    return cluster.client.complete([ChatMessage("user", text)], timeout_seconds=REQUEST_SECONDS, **options)


def test_every_answer_fits_its_schema_and_is_the_same_with_drafts_and_without(real, is_full):
    assert_exact(real)

    def answers(seed):
        choice = random.Random(seed)
        schema = random_schema(choice)
        options = {"json_schema": json.dumps(schema), "seed": seed, "max_tokens": 800}
        options |= {"temperature": choice.choice((1.0, 1.0, 1.0, 0.0))}
        question = choice.choice(QUESTIONS)
        return seed, schema, [ask(real, question, speculation=speculation, **options) for speculation in (True, False)]

    num_drafted = 0
    with ThreadPoolExecutor(8) as pool:
        for seed, schema, (drafted, plain) in pool.map(answers, range(500 if is_full else 8)):
            (found,), (expected,) = drafted.completions, plain.completions
            assert found.token_ids == expected.token_ids, f"schema {seed}"
            assert found.finished.reason is FinishReason.STOP, f"schema {seed}: {found.text!r}"
            jsonschema.validate(json.loads(found.text), schema)
            num_drafted += drafted.summary.metrics.speculation.num_accepted_draft_tokens
    assert num_drafted > 0
    real.wait_until_nothing_is_held()


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[A-Z][a-z]+ is (great|bad)[.!]"}, "[A-Z][a-z]+ is (great|bad)[.!]"),
        ({"grammar": 'start: "yes" | "no, " /[a-z ]{3,20}/\n'}, "yes|no, [a-z ]{3,20}"),
        ({"choice": ["Paris", "London", 'New "York"\n']}, 'Paris|London|New "York"\n'),
    ],
    ids=["regex", "grammar", "choice"],
)
@pytest.mark.parametrize("method", ["coupled", "rejection", "typical"])
def test_other_constraints_hold_by_every_verification_method(real, constraint, pattern, method):
    result = ask(
        real, "Tell me about Paris.", seed=3, n=4, max_tokens=60, verification_method=method, top_logprobs=3,
        logprobs_mode="sampled", **constraint,
    )  # fmt: skip
    for completion in result.completions:
        assert re.fullmatch(pattern, completion.text), completion.text
        assert all(each.logprob > -100 for each in completion.logprobs)


def test_an_answer_goes_on_where_it_was_in_its_grammar(real):
    options = {"json_schema": json.dumps(PERSON), "seed": 5, "max_tokens": 200}
    whole = ask(real, QUESTIONS[0], **options).completions[0]
    for num_known in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        rest = ask(real, QUESTIONS[0], generated_token_ids=whole.token_ids[:num_known], **options).completions[0]
        assert rest.token_ids == whole.token_ids[num_known:]


def test_what_the_grammar_forces_is_drafted(real):
    """The beginning of a property's name determines the rest, so drafts of the rest let a step commit more tokens."""
    summary = ask(real, QUESTIONS[0], json_schema=json.dumps(PERSON), temperature=0.0, max_tokens=200).summary
    speculation = summary.metrics.speculation
    assert speculation.num_accepted_draft_tokens >= 8, speculation


def test_ignoring_end_of_text_repeats_it_after_the_end(real):
    result = ask(real, "Say yes.", choice=["yes"], ignore_eos=True, max_tokens=12, temperature=0.0)
    completion = result.completions[0]
    assert completion.finished.reason is FinishReason.LENGTH
    assert completion.text == "yes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(ab"}, "unclosed group"),
        ({"json_schema": '{"properties": {"a": {"type": "strin"}}}'}, "at /properties/a"),
        ({"choice": ["yes"], "min_tokens": 9, "max_tokens": 12}, "min_tokens"),
        ({"grammar": "start: " + "a? " * 3000 + '\na: "x" | b\nb: "y"?\n'}, "Too many items"),
    ],
    ids=["regex", "schema", "min_tokens", "explodes"],
)
def test_what_cannot_be_answered_is_the_requests_fault(real, options, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        ask(real, "Say yes.", **options)
    assert raised.value.field.startswith("sampling.")
    real.wait_until_nothing_is_held()
