"""The meaning of constraints: literals that spell added tokens, for all kinds of tokenizers, and annotations."""

import json
import random
import re
from datetime import date
from ipaddress import IPv4Address
from itertools import product
from uuid import UUID

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from outrider.constraints.compiler import GrammarCompiler
from outrider.errors import InvalidRequestError
from outrider.request import Constraint, ConstraintKind
from tests.constraints.test_compiler import CONSTRAINTS, SCHEMA, TOKENIZER, VOCAB_SIZE, allowed, letters, random_answer
from tests.support.tiny_model import EOS_TOKEN_ID, tiny_tokenizer


@pytest.fixture
def compiler():
    return GrammarCompiler(TOKENIZER.to_str().encode(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])


def byte_level_with_added_tokens():
    tokenizer = tiny_tokenizer()
    for content, special in (("<think>", False), ("<a b>", False), ("[CITE]", False), ("<|note|>", True)):
        tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
    return tokenizer


def sentence_piece(*, metaspace):
    """Makes a tokenizer like Llama's, with byte fallback, or like Mistral's older ones, with a Metaspace decoder."""
    special, by_byte = ["<unk>", "<s>", "<|im_end|>"], [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["\u2581", *map(chr, range(33, 127)), "th", "the", "\u2581the"]
    vocabulary = {token: index for index, token in enumerate([*special, *by_byte, *characters])}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def word_piece():
    characters = [chr(number) for number in range(33, 127)]
    tokens = ["[UNK]", "<|im_end|>", *characters, *(f"##{character}" for character in characters), "the", "##the"]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


LITERALS = ["<think>", "a<think>b the <", "<a b>[CITE] ", "<|note|>", "x<|im_end|>The\n", "<unk><s>[UNK]"]


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize(
    "tokenizer",
    [byte_level_with_added_tokens(), sentence_piece(metaspace=False), sentence_piece(metaspace=True), word_piece()],
    ids=["byte-level", "byte fallback", "Metaspace", "WordPiece"],
)
@pytest.mark.parametrize("is_narrow", [False, True], ids=["as many rows", "fewer rows than ids"])
def test_a_literal_that_spells_an_added_token_is_visible_text(tokenizer, literal, is_narrow):
    num_ids = tokenizer.get_vocab_size()
    added = [token_id for token_id in tokenizer.get_added_tokens_decoder() if token_id > num_ids - 5]
    vocab_size = min(added) if is_narrow else num_ids + 10
    eos = tokenizer.token_to_id("<|im_end|>")
    compiler = GrammarCompiler(tokenizer.to_str().encode(), vocab_size=vocab_size, eos_token_ids=[eos])
    if isinstance(tokenizer.decoder, (decoders.Metaspace, decoders.WordPiece)):
        literal = literal.replace("\n", "")  # these tokenizers have no token for it
    if isinstance(tokenizer.model, models.WordPiece):
        literal = literal.replace(" ", "")
    escaped, in_json = re.escape(literal), json.dumps(literal, ensure_ascii=False)
    wanted = {
        Constraint(ConstraintKind.REGEX, escaped): {literal},
        Constraint(ConstraintKind.REGEX, f"({escaped}|x)c"): {f"{literal}c", "xc"},
        Constraint(ConstraintKind.CHOICE, options=(literal, "y")): {literal, "y"},
        Constraint(ConstraintKind.GRAMMAR, f"start: {in_json}"): {literal},
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"const": literal})): {in_json},
        Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [literal, "z"]})): {in_json, '"z"'},
        Constraint(
            ConstraintKind.JSON_SCHEMA,
            json.dumps(
                {
                    "type": "object",
                    "properties": {literal: {"const": 1}},
                    "required": [literal],
                    "additionalProperties": False,
                }
            ),
        ): {f"{{{in_json}:1}}"},
    }
    rng = random.Random(3)
    before = tokenizer.encode("a", add_special_tokens=False).ids
    for constraint, texts in wanted.items():
        for _ in range(3):
            token_ids = random_answer(compiler, constraint, rng, most=100, end=eos)
            assert token_ids[-1] == eos
            text = tokenizer.decode([*before, *token_ids[:-1]]).removeprefix(tokenizer.decode(before))
            assert text in texts or json.loads(text) in map(json.loads, texts), (text, texts)


@pytest.mark.parametrize(
    ("options", "may_follow"), [({}, False), ({"x-guidance": {"whitespace_flexible": True}}, True)]
)
def test_json_is_compact_unless_its_schema_says_otherwise(compiler, options, may_follow):
    """Otherwise a small model might write only whitespace."""
    state = compiler.start(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA | options)))
    state.commit(TOKENIZER.encode("{", add_special_tokens=False).ids)
    space = TOKENIZER.encode("\n", add_special_tokens=False).ids[0]
    assert (space in allowed(state.masks((), ())[0])) is may_follow
    text = random_answer(compiler, CONSTRAINTS["json_schema"], random.Random(4), most=400)
    found = TOKENIZER.decode(text[:-1])
    assert found == json.dumps(json.loads(found), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    "annotations",
    [
        *({"format": name} for name in ("password", "path", "uri-reference", "regex", "DATE", "", None)),
        {"contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"type": "integer"}},
        {"title": "t", "description": "d", "deprecated": True, "readOnly": True, "writeOnly": False, "default": 3},
        {"examples": [{"format": "x"}], "$comment": "c", "x-order": {"format": "y"}, "nullable": True, "example": 1},
        {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "$dynamicAnchor": "a", "discriminator": {}},
        {
            "propertyNames": {"type": "string", "format": "x"},
            "uniqueItems": False,
            "unevaluatedProperties": {},
            "dependencies": {},
        },
    ],
)
def test_annotations_of_a_schema_constrain_nothing(compiler, annotations):
    text = {"type": "string", "enum": ["yes", "format"]} | annotations
    schemas = {
        '"yes"': text,
        '{"format":["yes"]}': {
            "type": "object",
            "properties": {"format": {"type": "array", "items": text, "minItems": 1, "maxItems": 1}},
            "required": ["format"],
            "additionalProperties": False,
        },
        '["yes",{"format":"password"}]': {
            "$defs": {"format": {"$ref": "#/components/schemas/a"}},
            "components": {"schemas": {"a": text}},
            "prefixItems": [{"$ref": "#/$defs/format"}, {"const": {"format": "password"}}],
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
        },
        '"yes" or null': {"anyOf": [text, {"type": "null"}]},
    }
    for wanted, schema in schemas.items():
        state = compiler.start(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
        state.commit([*letters(wanted.removesuffix(" or null")), EOS_TOKEN_ID])
        assert not state.failure, schema


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *product(["date-time", "time", "duration", "date", "ipv4", "uuid"], [{}, {"minLength": 3}, {"maxLength": 40}]),
        ("time", {"minLength": 30}),
    ],
)
def test_a_known_format_holds_and_ends(compiler, name, limits):
    schema = {"type": "string", "format": name} | limits
    state, nines = compiler.start(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))), letters("9")[0]
    rng, token_ids = random.Random(5), []
    while EOS_TOKEN_ID not in token_ids:
        may_follow = sorted(allowed(state.masks((), ())[0]))
        token_ids.append(nines if nines in may_follow else rng.choice(may_follow))
        state.commit(token_ids[-1:])
        assert not state.failure
        assert len(token_ids) < 60, TOKENIZER.decode(token_ids)
    parse = {"date": date.fromisoformat, "uuid": UUID, "ipv4": IPv4Address}.get(name, str)
    assert parse(json.loads(TOKENIZER.decode(token_ids[:-1])))


def test_a_schema_that_nests_without_end_is_refused(compiler):
    nested = '{"anyOf": [' * 20_000 + "{}" + "]}" * 20_000
    with pytest.raises(InvalidRequestError, match="json_schema"):
        compiler.start(Constraint(ConstraintKind.JSON_SCHEMA, nested))
