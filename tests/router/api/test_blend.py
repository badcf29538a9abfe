"""Blended prompts: pieces are encoded alone, nodes are told their lengths, and the answer says what was reused."""

from __future__ import annotations

import grpc
import pytest

from outrider.errors import InvalidRequestError
from outrider.v1 import prefill_pb2, router_pb2
from router.api.blend_parsing import check_blend
from tests.support.router_fakes import fake_model_info

TEXT = "first doc##a second document##a question"


async def asked(cluster, **fields):
    """Returns the answer, and what nodes got: the pieces, the rest without special tokens, and the share."""
    answer = await cluster.generate(max_tokens=2, **fields)
    (request,) = cluster.prefill.requests
    (opened,) = cluster.decode.opened
    cluster.prefill.requests.clear()
    cluster.decode.opened.clear()
    assert opened.options.blend is None, "decode nodes and drafters do not need it"
    blend, tokens, pieces = request.options.blend, list(opened.prompt_token_ids), []
    for length in blend.piece_lengths:
        pieces.append(bytes(each for each in tokens[:length] if each < 256))
        del tokens[:length]
    return answer, pieces, bytes(each for each in tokens if each < 256), blend.recompute_share


async def test_a_text_is_split_at_its_separator(cluster):
    cluster.prefill.times = prefill_pb2.PrefillResponse(num_blended_tokens=6, num_recomputed_tokens=2)
    await cluster.serve()
    answer, pieces, rest, share = await asked(cluster, text=TEXT, blend=router_pb2.Blend(separator="##"))
    assert (pieces, rest, share) == ([b"first doc", b"a second document"], b"a question", 0.15)
    usage = answer.summary.usage
    assert usage.num_prompt_tokens == len(TEXT) - 4
    assert (usage.num_blended_tokens, usage.num_recomputed_tokens) == (6, 2)


async def test_a_chat_is_split_where_its_template_put_the_separator(cluster):
    await cluster.serve()
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="one@@two, which is longer@@?")])
    blend = router_pb2.Blend(separator="@@", recompute_share=0)
    _, pieces, rest, share = await asked(cluster, text=None, chat=chat, blend=blend)
    assert (pieces, rest, share) == ([b"user\none", b"two, which is longer"], b"?assistant\n", 0.0)


async def test_token_ids_have_the_lengths_of_their_pieces(cluster):
    await cluster.serve()
    tokens = router_pb2.TokenIds(ids=list(b"abcdefghijklmnopqrstuvwxyz"))
    blend = router_pb2.Blend(piece_lengths=[3, 16], recompute_share=1)
    _, pieces, rest, share = await asked(cluster, text=None, token_ids=tokens, blend=blend)
    assert (pieces, rest, share) == ([b"abc", b"defghijklmnopqrs"], b"tuvwxyz", 1.0)


async def test_empty_pieces_are_left_out(cluster):
    await cluster.serve()
    _, pieces, rest, _ = await asked(
        cluster, text="##a piece####another, long enough##rest", blend=router_pb2.Blend(separator="##")
    )
    assert (pieces, rest) == ([b"a piece", b"another, long enough"], b"rest")


async def test_kv_of_blended_prompts_is_shared_on_decode_nodes_with_no_other_request(cluster):
    await cluster.serve()
    blend = router_pb2.Blend(separator="##")
    for _ in range(2):
        await cluster.generate(text=TEXT, blend=blend, max_tokens=2)
    await cluster.generate(text=TEXT.replace("##", ""), max_tokens=2)
    salts = [opened.options.kv_salt for opened in cluster.decode.opened]
    assert len(set(salts)) == 3
    assert {request.options.cache_salt for request in cluster.prefill.requests} == {salts[2]}, "pieces are shared"


@pytest.mark.parametrize("why", ["no prefill node blends", "no piece is long enough", "nothing is separated"])
async def test_where_nothing_can_be_blended_the_prefix_cache_serves_as_usual(cluster, why):
    if why == "no prefill node blends":
        cluster.prefill.model = fake_model_info(can_blend=False)
    await cluster.serve()
    text = {"no piece is long enough": "a##b##c" * 20, "nothing is separated": "abc" * 20}.get(why, TEXT)
    await cluster.generate(text=text, blend=router_pb2.Blend(separator="##"), max_tokens=2)
    await cluster.generate(text="other", max_tokens=2)
    first, second = cluster.decode.opened
    assert first.options.kv_salt == second.options.kv_salt
    assert not cluster.prefill.requests[0].options.HasField("blend")


async def test_what_a_lost_prefill_node_blended_is_not_kept(cluster):
    await cluster.serve()
    cluster.prefill.fails_with = grpc.StatusCode.UNAVAILABLE
    await cluster.generate(text=TEXT, blend=router_pb2.Blend(separator="##"), max_tokens=2)
    assert cluster.decode.retargeted
    assert not any(retarget.keeps_received for retarget in cluster.decode.retargeted)


def test_the_number_of_pieces_is_limited():
    request = router_pb2.GenerateRequest(token_ids={"ids": [1] * 2000}, blend={"piece_lengths": [1] * 1024})
    check_blend(request)
    request.blend.piece_lengths.append(1)
    with pytest.raises(InvalidRequestError, match="at most 1024 pieces"):
        check_blend(request)
