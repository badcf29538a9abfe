"""Blended prompts: pieces are encoded alone, nodes are told their lengths, and the answer says what was reused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.errors import NotSupportedError
from outrider.v1 import prefill_pb2, router_pb2
from outrider.wire.request import options_from_proto
from router.api.blend_parsing import check_blend
from tests.support.router_fakes.model import fake_model_info

TEXT = "first doc##second##a question"


async def asked(cluster, **fields):
    """Returns the answer, and what nodes got: the pieces, the rest without special tokens, and the share."""
    answer = await cluster.generate(max_tokens=2, **fields)
    (request,) = cluster.prefill.requests
    (opened,) = cluster.decode.opened
    cluster.prefill.requests.clear()
    cluster.decode.opened.clear()
    assert opened.options.blend == options_from_proto(request.options).blend
    blend, tokens, pieces = request.options.blend, list(opened.prompt_token_ids), []
    for length in blend.piece_lengths:
        pieces.append(bytes(each for each in tokens[:length] if each < 256))
        del tokens[:length]
    return answer, pieces, bytes(each for each in tokens if each < 256), blend.recompute_share


async def test_a_text_is_split_at_its_separator(cluster):
    cluster.prefill.times = prefill_pb2.PrefillResponse(num_blended_tokens=6, num_recomputed_tokens=2)
    await cluster.serve()
    answer, pieces, rest, share = await asked(cluster, text=TEXT, blend=router_pb2.Blend(separator="##"))
    assert (pieces, rest, share) == ([b"first doc", b"second"], b"a question", 0.15)
    usage = answer.summary.usage
    assert usage.num_prompt_tokens == len(TEXT) - 4
    assert (usage.num_blended_tokens, usage.num_recomputed_tokens) == (6, 2)


async def test_a_chat_is_split_where_its_template_put_the_separator(cluster):
    await cluster.serve()
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="one@@two@@?")])
    blend = router_pb2.Blend(separator="@@", recompute_share=0)
    _, pieces, rest, share = await asked(cluster, text=None, chat=chat, blend=blend)
    assert (pieces, rest, share) == ([b"user\none", b"two"], b"?assistant\n", 0.0)


async def test_token_ids_have_the_lengths_of_their_pieces(cluster):
    await cluster.serve()
    tokens = router_pb2.TokenIds(ids=list(b"abcdefghij"))
    blend = router_pb2.Blend(piece_lengths=[3, 4], recompute_share=1)
    _, pieces, rest, share = await asked(cluster, text=None, token_ids=tokens, blend=blend)
    assert (pieces, rest, share) == ([b"abc", b"defg"], b"hij", 1.0)


async def test_empty_pieces_are_left_out(cluster):
    await cluster.serve()
    _, pieces, rest, _ = await asked(cluster, text="##a piece####rest", blend=router_pb2.Blend(separator="##"))
    assert (pieces, rest) == ([b"a piece"], b"rest")


def test_a_model_that_cannot_be_blended_is_named_with_the_reason():
    model = replace(fake_model_info(), no_blend="KV of sliding windows cannot be moved")
    request = router_pb2.GenerateRequest(text=TEXT, blend=router_pb2.Blend(separator="##"))
    with pytest.raises(NotSupportedError, match="fake-model cannot be blended: KV of sliding windows") as refusal:
        check_blend(request, model)
    assert refusal.value.field == "blend"
