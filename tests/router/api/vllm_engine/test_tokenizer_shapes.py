"""The gateway and the router's own service give the same ids and text, for several kinds of tokenizer."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.v1 import router_pb2
from tests.router.api.vllm_engine.smg_process import MODEL, gateway_before, own
from tests.router.threaded_router import ThreadedRouter
from tests.support.router_fakes import fake_model_info

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "\n  {% if true %}{{ bos_token }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if mood is defined %}<{{ mood }}>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["Hello there", " two  spaces\n\n", "😀日é", "a<|im_end|>b <note> c", "<s>again"]
ANSWER = "One 😀日, <note> two  spaces\n"


def byte_level(**added):
    vocab = {token: number for number, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer, **added)


def sentence_piece(*, scheme=""):
    """Makes a tokenizer like Llama 2's or, with `scheme`, like newer conversions of it."""
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyzHOT,<>|_", "\u2581t", "he"]
    vocab = {token: number for number, token in enumerate([*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *pieces])}
    merges = [("\u2581", "t"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    else:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return with_added(tokenizer)


def with_added(tokenizer, *, is_stripped=False):
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<note>", normalized=False, lstrip=is_stripped, rstrip=is_stripped)])
    return tokenizer


def around(tokenizer, template, *others):
    tokens = [(token, SPECIAL.index(token)) for token in ("<s>", "</s>")]
    by_template = processors.TemplateProcessing(single=template, pair=f"{template} $B", special_tokens=tokens)
    tokenizer.post_processor = processors.Sequence([*others, by_template]) if others else by_template
    return tokenizer


SHAPES = {
    "byte level": byte_level,
    "byte level, stripped added token": lambda: byte_level(is_stripped=True),
    "byte level, BOS": lambda: around(byte_level(), "<s> $A", processors.ByteLevel(trim_offsets=False)),
    "SentencePiece, BOS": lambda: around(sentence_piece(), "<s> $A"),
    "SentencePiece, first, BOS and EOS": lambda: around(sentence_piece(scheme="first"), "<s> $A </s>"),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def shape(request):
    """Returns (tokenizer, router, client)."""
    tokenizer = request.param()
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    model = fake_model_info(vocab_size=400, eos_token_ids=(2,))
    router = ThreadedRouter(tokenizer_files=files, model=model)
    try:
        decode = router.cluster.decode
        token_ids = [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, SPECIAL.index("</s>")]
        decode.script = lambda _opened, _sample: token_ids
        with gateway_before(router) as client:
            yield tokenizer, router, client
    finally:
        router.stop()


def text_of(answer, *, stream):
    if not stream:
        (choice,) = answer.choices
        return choice.text if hasattr(choice, "text") else choice.message.content
    choices = [choice for chunk in answer for choice in chunk.choices]
    return "".join((choice.text if hasattr(choice, "text") else choice.delta.content) or "" for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_our_own_service(shape, stream):
    tokenizer, router, client = shape
    opened = router.cluster.decode.opened
    for text in TEXTS:
        ours = own(router, text=text, seed=1, max_tokens=100)
        answer = client.completions.create(model=MODEL, prompt=text, seed=1, max_tokens=100, stream=stream)
        assert text_of(answer, stream=stream) == ours.completions[0].text
        assert opened[-1].prompt_token_ids == opened[-2].prompt_token_ids == tuple(tokenizer.encode(text).ids)
    answer = client.completions.create(model=MODEL, prompt=TEXTS, seed=1, max_tokens=100)
    assert [choice.text for choice in answer.choices] == [ours.completions[0].text] * len(TEXTS)
    found = {opening.prompt_token_ids for opening in opened[-len(TEXTS) :]}
    assert found == {tuple(tokenizer.encode(text).ids) for text in TEXTS}


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_those_of_our_own_service(shape, stream):
    _, router, client = shape
    opened = router.cluster.decode.opened
    for text in TEXTS:
        message = {"role": "user", "content": text}
        chat = {"messages": [router_pb2.ChatMessage(**message)]}
        ours = own(router, chat=chat, seed=1, max_tokens=100)
        answer = client.chat.completions.create(model=MODEL, messages=[message], seed=1, max_tokens=100, stream=stream)
        assert text_of(answer, stream=stream) == ours.completions[0].text
        assert opened[-1].prompt_token_ids == opened[-2].prompt_token_ids
        assert opened[-1].options == opened[-2].options


def test_what_a_client_leaves_out_of_a_message_is_empty(shape):
    """The template concatenates texts, and would fail for a null."""
    tokenizer, router, client = shape
    call = {"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    turn = {"role": "assistant", "tool_calls": [call]}
    prompts = []
    for content in ({}, {"content": None}, {"content": []}, {"content": ""}):
        messages = [
            {"role": "user", "content": "x"},
            turn | content,
            {"role": "tool", "tool_call_id": "c", "content": "y"},
        ]
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=100)
        prompts.append(tokenizer.decode(router.cluster.decode.opened[-1].prompt_token_ids, skip_special_tokens=False))
    assert len(set(prompts)) == 1
    assert "assistant\n<|im_end|>" in prompts[0].replace("> ", ">")


def test_arguments_of_the_template_reach_it(shape):
    tokenizer, router, client = shape
    messages = [{"role": "user", "content": "x"}]
    arguments = {"extra_body": {"chat_template_kwargs": {"mood": "brief", "other": 1}}}
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, **arguments)
    prompt = tokenizer.decode(router.cluster.decode.opened[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<brief>" in prompt.replace(" ", "")


def test_log_probabilities_of_whole_characters_have_their_bytes(shape):
    _, _, client = shape
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=1
    )
    (choice,) = answer.choices
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content) == choice.message.content.encode()
