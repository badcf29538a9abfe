"""The public API passes template variables and members of messages on, and returns the bytes of tokens."""

import grpc

from outrider.v1 import router_pb2
from outrider.wire.request import chat_from_proto


async def test_logprobs_say_the_bytes_of_their_tokens_where_they_are_asked_for(cluster):
    cluster.decode.script = lambda *_: [*"😀<".encode(), 258, 259, 256]
    await cluster.serve()
    output = router_pb2.OutputOptions(top_logprobs=1, token_bytes=True, skip_special_tokens=False)
    answer = await cluster.generate(max_tokens=20, output=output)
    logprobs = [entry for delta in answer.deltas[0] for entry in delta.logprobs]
    parts = [*(bytes([byte]) for byte in "😀<".encode()), b"<|end|>", b"plain added", b"<|endoftext|>"]
    assert [entry.token_bytes for entry in logprobs] == parts
    assert b"".join(parts[:-1]).decode() == answer.text()
    assert all(entry.top[0].token_bytes for entry in logprobs)
    complete = await cluster.stub.Complete(cluster.request(max_tokens=20, output=output))
    assert [entry.token_bytes for entry in complete.completions[0].logprobs] == parts


def test_members_of_a_message_come_in_one_order():
    """The order matters because templates print messages as JSON."""
    members = {"name": '"n"', "content": "null", "tool_calls": "[]", "a": "1", "role": '"other"'}
    message = router_pb2.ChatMessage(role="user", content="x", members=members)
    (found,), _ = chat_from_proto(router_pb2.Chat(messages=[message]))
    assert list(found.items()) == [("role", "user"), ("content", None), ("a", 1), ("name", "n"), ("tool_calls", [])]


async def test_variables_of_the_template_and_members_of_messages_reach_it(cluster):
    await cluster.serve()
    user = router_pb2.ChatMessage(role="user", content="x", members={"content": '[{"type": "text", "text": "y"}]'})

    chat = router_pb2.Chat(messages=[user], template_kwargs={"thought": "12"})
    opened = await cluster.stub.Tokenize(router_pb2.TokenizeRequest(chat=chat))
    assert list(opened.token_ids) == [257, *b"user\ny", 258, 257, *b"assistant\n12"]
    continued = router_pb2.Chat(messages=[user], continue_final_message=True)
    opened = await cluster.stub.Tokenize(router_pb2.TokenizeRequest(chat=continued))
    assert list(opened.token_ids) == [257, *b"user\ny"]
    for changes, field in (
        ({"template_kwargs": {"thought": "{"}}, "chat.template_kwargs"),
        ({"template_kwargs": {"messages": "[]"}}, "chat.template_kwargs"),
        ({"messages": [router_pb2.ChatMessage(role="user", members={"name": "'"})]}, "chat.messages[0].members"),
    ):
        values = {"messages": [user]} | changes
        failure = await cluster.fail(cluster.request(chat=router_pb2.Chat(**values)))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
