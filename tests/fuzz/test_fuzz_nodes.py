"""Any message to a node's engine gives a refusal or an event, no exception in its thread, and leaves nothing behind.

test_fuzz_services.py tests bytes that are no message, and calls to prefill nodes.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.commands import RouterCommand, SessionEnded
from outrider.errors import OutriderError
from outrider.session import CancelSequenceGroup, OpenSequenceGroup, RetargetSequenceGroup
from outrider.v1 import session_pb2
from outrider.wire.session import command_from_proto
from tests.decode_node.conftest import Node
from tests.decode_node.driven_node import SESSION
from tests.fuzz.messages import fuzzed, messages

S = session_pb2
GROUPS = st.sampled_from([bytes(16), b"\1" * 16, b"\2" * 16])


def command_of(session_id, proto):
    """Returns the command that a session would submit, or None if the session would end."""
    try:
        command = command_from_proto(proto)
    except OutriderError:
        return None
    match command:
        case OpenSequenceGroup():
            return RouterCommand(session_id, command, "decode")
        case RetargetSequenceGroup():
            return RouterCommand(session_id, command)
        case CancelSequenceGroup():
            return RouterCommand(session_id, command)


@st.composite
def likely_opens(draw):
    """Draws messages similar to a router's, so that many are granted."""
    opened = draw(messages(S.OpenSequenceGroup, sequence_group_id=draw(GROUPS), transfer_id=draw(GROUPS)))
    if draw(st.booleans()):
        opened.prompt_token_ids[:] = draw(st.lists(st.integers(0, 70), max_size=40))
    if draw(st.booleans()):
        opened.options.sampling.max_tokens = draw(st.integers(0, 250))
        opened.options.sampling.temperature = draw(st.sampled_from([0.0, 1.0]))
    return S.SessionCommand(open=opened)


SESSION_COMMANDS = st.lists(
    likely_opens()
    | messages(S.SessionCommand)
    | GROUPS.map(lambda group: S.SessionCommand(cancel=S.CancelSequenceGroup(sequence_group_id=group))),
    max_size=8,
)


@fuzzed(10)
@given(protos=SESSION_COMMANDS)
def test_any_commands_of_a_router_leave_a_decode_node_whole(protos):
    node = Node()
    for proto in protos:
        command = command_of(SESSION, proto)
        if command is not None:
            node.loop.submit(command)
        node.iterate()
    for _ in range(5):
        node.iterate()
    node.loop.submit(SessionEnded(SESSION))
    node.iterate()
    node.assert_nothing_is_held()
    group_id = node.open()
    node.run()
    assert node.tokens(group_id) == node.model.generate((1, 2, 3), 5)
