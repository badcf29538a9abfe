"""The messages that a router gets about constraints that do not compile."""

import json

import pytest

from outrider.constraints.compile_process import find_faulty_part, why_invalid
from outrider.constraints.grammar import open_tokenizer
from outrider.request import Constraint, ConstraintKind
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return open_tokenizer(tiny_tokenizer().to_str(), vocab_size=300, eos_token_ids=[EOS_TOKEN_ID])


def of_schema(tokenizer, schema):
    return why_invalid(tokenizer, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "(at /properties/a)"),
        ({"anyOf": [{"type": "string"}, {"items": {"pattern": "(a"}}]}, "(at /anyOf/1/items)"),
        ({"prefixItems": [{}, {"uniqueItems": True, "type": "array"}]}, "(at /prefixItems/1)"),
        ({"$defs": {"x": {"type": "strin"}}, "$ref": "#/$defs/x"}, "(at /$defs/x)"),
        ({"$defs": {"x": {}}, "properties": {"a": {"$ref": "#/$defs/y"}}}, "(at /properties/a)"),
        ({"type": "strin"}, ""),
    ],
)
def test_the_place_in_a_schema_is_named(tokenizer, schema, place):
    message = of_schema(tokenizer, schema)
    assert message.endswith(place)
    assert ("(at " in message) == bool(place)


@pytest.mark.parametrize("schema", [True, {}, {"$defs": {"x": {"type": "null"}}, "$ref": "#/$defs/x"}])
def test_what_compiles_has_no_fault(tokenizer, schema):
    assert of_schema(tokenizer, schema) is None


def test_the_innermost_part_is_looked_for_with_the_definitions_at_hand():
    asked = []

    def compiles(schema):
        asked.append(schema)
        return "bad" not in json.dumps({name: part for name, part in schema.items() if name != "$defs"})

    schema = {"$defs": {"x": 1}, "properties": {"a": {"type": "string"}, "b": {"items": {"type": "bad"}}}}
    assert find_faulty_part(schema, compiles) == ("properties", "b", "items")
    assert all("$defs" in each for each in asked)
