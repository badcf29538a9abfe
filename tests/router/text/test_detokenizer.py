"""Decoding token by token equals decoding all at once, for several kinds of tokenizer."""

from __future__ import annotations

import asyncio
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from outrider.model_hub.checkpoint_text import read_text
from router.text.answer_text import ByteDetokenizer, WindowDetokenizer
from router.text.tokenizer import Tokenizer
from tests.support.router_fakes import fake_tokenizer_files

BYTE_LEVEL = tokenizers.Tokenizer.from_buffer(fake_tokenizer_files()["tokenizer.json"])
OURS = Tokenizer(read_text(fake_tokenizer_files()))


def decode_with(detokenizer, token_ids):
    return "".join([*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.finish()])


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(0, 263), max_size=40), skip=st.booleans())
def test_any_bytes_decode_as_the_library_decodes_them(token_ids, skip):
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert decode_with(OURS.detokenizer(skip_special_tokens=skip), token_ids) == whole


def test_no_incomplete_character_is_ever_given_out():
    detokenizer = OURS.detokenizer(skip_special_tokens=True)
    pieces = [detokenizer.append(byte) for byte in "a🙂b".encode()]
    assert pieces == ["a", "", "", "", "🙂", "b"]


def test_an_id_beyond_the_table_adds_nothing():
    assert ByteDetokenizer([b"a"]).append(7) == ""


def sentencepiece_like():
    """Makes a tokenizer like those of Llama 2 and Mistral: ▁ for spaces, byte fallback, no leading space."""
    words = ["▁the", "▁cat", "▁", "s", "at", "▁sat", "é", "日"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    vocab |= {word: 257 + index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece():
    vocab = {"[UNK]": 0, "un": 1, "##able": 2, "token": 3, "##s": 4, ",": 5}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["▁the", "▁cat", "▁", "s", "at", "▁sat", "é", "日", "é-bytes", "🙂-bytes"]), max_size=20
    )
)
def test_the_window_method_decodes_sentencepiece_text(pieces):
    tokenizer = sentencepiece_like()
    token_ids: list[int] = []
    for piece in pieces:
        if piece.endswith("-bytes"):
            token_ids += [1 + byte for byte in piece.removesuffix("-bytes").encode()]
        else:
            token_ids.append(tokenizer.token_to_id(piece))
    whole = tokenizer.decode(token_ids)
    assert decode_with(WindowDetokenizer(lambda ids: tokenizer.decode(list(ids))), token_ids) == whole


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(1, 5), max_size=20))
def test_the_window_method_decodes_word_pieces(token_ids):
    tokenizer = word_piece()
    whole = tokenizer.decode(token_ids)
    assert decode_with(WindowDetokenizer(lambda ids: tokenizer.decode(list(ids))), token_ids) == whole


def test_the_window_goes_on_from_the_prompt():
    tokenizer = sentencepiece_like()
    the, cat = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("▁cat")
    detokenizer = WindowDetokenizer(lambda ids: tokenizer.decode(list(ids)), [the])
    assert detokenizer.append(cat) == " cat"


def test_the_window_stays_short_on_broken_bytes():
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return sentencepiece_like().decode(list(token_ids))

    decode_with(WindowDetokenizer(decode), [1 + 0xFF] * 60)
    assert max(lengths) <= 64


async def test_chat_and_text_are_encoded_as_the_contract_says():
    files = fake_tokenizer_files()
    tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 257)]
    )
    ours = Tokenizer(read_text({**files, "tokenizer.json": tokenizer.to_str().encode()}))
    assert (await ours.encode_text("a<|end|>")).token_ids == [257, 97, 258]
    chat = [{"role": "user", "content": "hi"}]
    rendered = await ours.encode_chat(lambda template: template.render(chat, add_generation_prompt=True))
    assert rendered.token_ids == [257, *b"user\nhi", 258, 257, *b"assistant\n"]
    rendered = await ours.encode_chat(lambda template: template.render(chat, add_generation_prompt=False))
    assert rendered.token_ids == [257, *b"user\nhi", 258]
    ours.close()


def test_files_without_a_tokenizer_are_refused():
    from outrider.errors import ModelError

    with pytest.raises(ModelError):
        read_text({"tokenizer_config.json": b"{}"})
    with pytest.raises(ModelError):
        read_text({"tokenizer.json": b"not json"})
    broken = {"tokenizer_config.json": json.dumps({"chat_template": "{% if %}"}).encode()}
    with pytest.raises(ModelError):
        Tokenizer(read_text(fake_tokenizer_files() | broken))


def test_merged_tokens_decode_like_their_bytes():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, été 日本 🙂 " * 5], trainer)
    ours = Tokenizer(read_text({"tokenizer.json": tokenizer.to_str().encode()}))
    token_ids = tokenizer.encode("the été 🙂 cat 日本!").ids
    assert decode_with(ours.detokenizer(skip_special_tokens=True), token_ids) == "the été 🙂 cat 日本!"
    assert asyncio.run(ours.decode(token_ids, skip_special_tokens=True)) == "the été 🙂 cat 日本!"
