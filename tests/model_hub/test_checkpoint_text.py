"""The text settings in a checkpoint's files, compared with transformers if it reads them too."""

import json

import pytest
import tokenizers

from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import open_text, read_text, read_vocabulary, resolved_files
from router.text.chat_template import ChatTemplate

TEXT = "hi <tool>a</tool> <|note|>b <|im_end|> <|new|><x>"
CHAT = [{"role": "user", "content": "hi"}]


def token(content, *, special=True, **flags):
    return {"content": content, "special": special, "lstrip": False, "rstrip": False, "single_word": False} | flags


def files_of(config=None, *, added=(), **others):
    """Makes a byte-level tokenizer of 260 ids with `added` tokens. `others`: further files by name without ".json"."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<tool>", "<|im_end|>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(list(added))
    found = {"tokenizer.json": tokenizer.to_str().encode(), "config.json": b'{"model_type": "llama"}'}
    objects = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}, **others}
    return found | {f"{name}.json": json.dumps(value).encode() for name, value in objects.items()}


SHAPES = {
    "nothing": files_of(),
    "declared in tokenizer_config": files_of(
        {"eos_token": "</s>", "added_tokens_decoder": {"0": token("<s>"), "260": token("<|note|>")}}
    ),
    "declared, other ids than the next free": files_of(
        {"added_tokens_decoder": {"300": token("<|note|>"), "270": token("<|new|>", special=False, normalized=False)}}
    ),
    "declared with other flags": files_of(
        {"added_tokens_decoder": {"0": token("<s>", special=False), "1": token("</s>", rstrip=True)}}
    ),
    "special_tokens_map": files_of(
        special_tokens_map={"bos_token": "<s>", "eos_token": token("<|im_end|>"), "pad_token": "</s>"}
    ),
    "special_tokens_map before tokenizer_config": files_of(
        {"bos_token": "</s>", "eos_token": "</s>"}, special_tokens_map={"bos_token": "<s>", "unk_token": None}
    ),
    "tokenizer_config before special_tokens_map": files_of(
        {"bos_token": "<s>", "added_tokens_decoder": {}}, special_tokens_map={"bos_token": "</s>", "eos_token": "<s>"}
    ),
    "added_tokens": files_of(
        {"additional_special_tokens": ["<|note|>"]}, added_tokens={"<|new|>": 261, "<|note|>": 260, "<s>": 0}
    ),
    "named but unknown to the tokenizer": files_of(
        {"x_token": "<x>", "eos_token": "<|im_end|>", "pad_token": "<|new|>", "add_bos_token": True}
    ),
    "additional": files_of(
        {"additional_special_tokens": ["<tool>", {"__type": "AddedToken", **token("</tool>", lstrip=True)}]}
    ),
    "extra, by name": files_of({"extra_special_tokens": {"x_token": "<x>"}, "bos_token": None}),
    "extra, by name, beside those of special_tokens_map": files_of(
        {"extra_special_tokens": {"x_token": "<x>"}, "y_token": "<tool>"},
        special_tokens_map={"additional_special_tokens": ["<|new|>"], "y_token": "</s>", "z_token": "<s>"},
    ),
    "extra without a name in both": files_of(
        {"extra_special_tokens": ["<x>"]},
        special_tokens_map={"extra_special_tokens": ["<|new|>", "<x>"], "additional_special_tokens": ["<|note|>"]},
    ),
    "an end that is not special in the tokenizer": files_of({"eos_token": "<|im_end|>"}, added=["<|im_end|>"]),
    "template in tokenizer_config": files_of({"bos_token": "<s>", "chat_template": "{{ bos_token }}config"}),
    "several templates": files_of(
        {"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]}
    ),
    "template file": files_of({"chat_template": "config"}) | {"chat_template.jinja": b"file {{ messages[0].content }}"},
    "template files": files_of({"chat_template": "config"})
    | {"additional_chat_templates/tool_use.jinja": b"tools", "chat_template.jinja": b"file"},
}


@pytest.mark.parametrize("files", SHAPES.values(), ids=SHAPES)
def test_files_say_what_they_say_to_transformers(files, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    read, ours = open_text(tmp_path)
    assert read == files
    backend = tokenizers.Tokenizer.from_buffer(ours.tokenizer_json)
    assert backend.encode(TEXT).ids == theirs(TEXT)["input_ids"]
    assert {token_id: str(token) for token_id, token in theirs.added_tokens_decoder.items()} == {
        token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
    }
    token_ids = list(range(len(theirs)))
    assert backend.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
    assert ours.vocabulary == {token_id: theirs.convert_ids_to_tokens(token_id) for token_id in ours.vocabulary}
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    template = ChatTemplate(ours.chat_templates, ours.special_tokens)
    if theirs.chat_template is not None:
        rendered = template.render(CHAT, add_generation_prompt=True)
        assert rendered == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert ours.own_vocabulary == read_vocabulary(files["tokenizer.json"])
    again = read_text(resolved_files(files, ours))
    assert (again.special_tokens, again.vocabulary) == (ours.special_tokens, ours.vocabulary)


def test_a_reader_of_one_template_has_the_one_for_tools_too():
    named = {"default": "\n a{% set x = 1 %}{{ x }} \n", "tool_use": "  {% if true %}\n b{% endif %}\n  \n"}
    files = files_of({"chat_template": [{"name": name, "template": source} for name, source in named.items()]})
    text = read_text(files)
    theirs = {"default": resolved_files(files, text)["chat_template.jinja"].decode()}
    for tools in (None, [], [{"type": "function"}]):
        ours, found = (
            ChatTemplate(sources, {}).render(CHAT, add_generation_prompt=True, tools=tools)
            for sources in (text.chat_templates, theirs)
        )
        assert found == ours, tools


def test_the_oldest_place_of_a_template_counts_where_there_is_no_other():
    old = {"chat_template.json": b'{"chat_template": "old"}'}
    assert read_text(files_of() | old).chat_templates == {"default": "old"}
    assert read_text(files_of({"chat_template": "newer"}) | old).chat_templates == {"default": "newer"}


def test_every_end_that_any_file_names_counts():
    def ends(config, generation_config, **tokenizer_config):
        return read_text(
            files_of(tokenizer_config, generation_config=generation_config)
            | {"config.json": json.dumps(config).encode()}
        ).eos_token_ids

    assert ends({"eos_token_id": 2}, {}) == (2,)
    assert ends({"eos_token_id": 7}, {"eos_token_id": [5, 7]}, eos_token="</s>") == (1, 5, 7)
    assert ends({"text_config": {"eos_token_id": [1]}}, {"eos_token_id": 0}) == (0, 1)
    assert ends({"eos_token_id": None}, {"eos_token_id": -1}) == ()
    assert ends({"eos_token_id": 9999}, {}) == (9999,)  # the model may have no such row
    assert ends({"text_config": [1]}, {"eos_token_id": 2}, eos_token={"lstrip": True}) == (2,)


def test_sampling_of_the_generation_config_is_what_it_names_and_the_contract_allows():
    def sampling(text):
        return read_text(files_of() | {"generation_config.json": text}).default_sampling

    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20.0,
        "top_p": 0,
        "min_p": None,
        "repetition_penalty": "1.1",
        "eos_token_id": 2,
    }
    assert sampling(json.dumps(config).encode()) == {"temperature": 0.6, "top_k": 20}
    assert sampling(b'{"temperature": NaN, "top_k": 1e400}') == {}
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON"):
        sampling(b"{")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"model": {"vocab": 3}}', b'{"model": {"vocab": {"a": "x"}}}']
)
def test_what_is_no_tokenizer_is_refused(content):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_vocabulary(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "a"}]}'),
        ("config.json", b'{"eos_token_id": {}}'),
        ("added_tokens.json", b'{"a": "b"}'),
    ],
)
def test_a_damaged_file_is_refused_by_name(name, content):
    with pytest.raises(ModelError, match="json"):
        read_text(files_of() | {name: content})


def test_a_model_without_a_fast_tokenizer_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ModelError, match="save_pretrained"):
        open_text(tmp_path)
