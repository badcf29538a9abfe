"""What a router has a node load and unload, given what it wants and what the node reports."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from outrider.errors import (
    InvalidRequestError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    NotSupportedError,
    PeerLostError,
)
from outrider.request import Adapter
from router.nodes.node_adapters import NodeAdapters, agreed

ONE, TWO, LAW = Adapter("sql", "1" * 64), Adapter("sql", "2" * 64), Adapter("law", "3" * 64)


class ScriptedTransport:
    """Answers each call with the next one of `answers`."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    async def load_adapter(self, *arguments):
        return self._answer("load", *arguments)

    async def unload_adapter(self, *arguments):
        self._answer("unload", *arguments)

    def _answer(self, *call):
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def node_of(*reported, answers=()):
    node = NodeAdapters(SimpleNamespace(name="decode-0", transport=ScriptedTransport(*answers)))
    node.take_report(reported)
    return node


def test_a_node_loads_what_it_lacks():
    wanted = [(ONE, "d"), (LAW, "e")]
    assert node_of().steps(wanted) == wanted
    assert node_of(ONE).steps(wanted) == [(LAW, "e")]
    assert node_of(TWO).steps([(ONE, "d")]) == []  # another one of its name stays


def test_a_node_unloads_first_what_is_in_the_way():
    node = node_of(TWO)
    node.forget(TWO, is_asked=False)
    assert node.usable == set()
    assert node.steps([(ONE, "d")]) == [(TWO, None), (ONE, "d")]
    node.unwanted[TWO] = True  # it has answered, and its report is still to come
    assert node.steps([(ONE, "d")]) == [(TWO, None), (ONE, "d")]
    assert node.take_report([]) == (set(), set())
    assert node.steps([(ONE, "d")]) == [(ONE, "d")]
    assert not node.unwanted


def test_an_unwanted_adapter_is_forgotten_once_it_cannot_come_any_more():
    having, asked = node_of(ONE), node_of()
    asked.asked.add(ONE)
    for node in (having, asked):
        node.set_link(None)
        node.forget(ONE, is_asked=False)
        node.set_link(node.link)
        node.take_report([])
    assert not having.unwanted
    assert asked.steps([]) == [(ONE, None)]


def test_changes_that_others_have_made_are_found():
    node = node_of(ONE, LAW)
    assert node.take_report([LAW]) == ({ONE}, set())
    assert node.take_report([LAW, TWO]) == (set(), {TWO})
    node.forget(LAW, is_asked=False)
    node.asked.add(ONE)
    assert node.take_report([ONE]) == ({TWO}, set())
    assert not node.asked


@pytest.mark.parametrize("is_serving", [False, True])
def test_an_adapter_is_unwanted_where_it_is_or_may_come(is_serving):
    having, asked, other = node_of(ONE), node_of(), node_of()
    asked.asked.add(ONE)
    for node in (having, asked, other):
        if not is_serving:
            node.set_link(None)
        assert node.is_serving is is_serving
        node.forget(ONE, is_asked=False)
    assert [ONE in node.unwanted for node in (having, asked, other)] == [True, True, is_serving]


def test_another_router_asks_the_serving_nodes_itself():
    having, asked, lost = node_of(ONE), node_of(), node_of(ONE)
    asked.asked.add(ONE)
    lost.set_link(None)
    for node in (having, asked, lost):
        node.forget(ONE, is_asked=True)
    assert [ONE in node.unwanted for node in (having, asked, lost)] == [False, True, True]


def test_an_adapter_that_is_loaded_again_is_not_taken_for_unloaded():
    node = node_of(ONE)
    node.forget(ONE, is_asked=False)
    node.unwanted[ONE] = True
    node.set_link(None)  # it is lost before its report shows that it has unloaded it
    node.permit(ONE)
    node.set_link(node.link)
    assert node.take_report([]) == (set(), set())
    assert node.steps([(ONE, "d")]) == [(ONE, "d")]


async def test_other_content_is_loaded_only_if_it_is_wanted_anew(capsys):
    node = node_of(answers=[MismatchError("other content"), ONE])
    await node.take_step((ONE, "d"))
    assert node.steps([(ONE, "d")]) == []
    assert not node.asked
    assert "decode-0: other content" in capsys.readouterr().out
    node.permit(ONE)
    assert node.steps([(ONE, "d")]) == [(ONE, "d")]
    await node.take_step((ONE, "d"))
    assert node.link.transport.calls == 2 * [("load", "sql", "d", ONE.fingerprint)]
    assert node.asked == {ONE}


async def test_failures_are_logged_once_and_tried_again(capsys):
    failures = [InvalidRequestError("no file", field="directory"), InvalidRequestError("no file", field="directory")]
    node = node_of(answers=[*failures, PeerLostError("late")])
    for number in range(3):
        assert node.steps([(ONE, "d")]) == [(ONE, "d")]
        assert node.num_failures([(ONE, "d")]) == number
        await node.take_step((ONE, "d"))
    assert capsys.readouterr().out.count("decode-0: no file") == 1
    assert node.asked == {ONE}, "it may have loaded it although it has not answered"
    assert node.num_failures([(ONE, "d"), (LAW, "e")]) == 0
    node.permit(ONE)
    assert node.num_failures([(ONE, "d")]) == 0


async def test_an_old_adapter_is_unloaded_before_a_new_one_is_loaded():
    node = node_of(ONE, answers=[None, TWO])
    node.forget(ONE, is_asked=False)
    assert await node.load("sql", "d") == TWO
    assert node.link.transport.calls == [("unload", "sql", ONE.fingerprint), ("load", "sql", "d", "")]


async def test_what_a_node_does_not_have_is_unloaded():
    node = node_of(answers=[NotFoundError("none")])
    node.asked.add(ONE)
    node.forget(ONE, is_asked=False)
    await node.unload(ONE)
    assert not node.unwanted
    assert not node.asked


async def test_a_node_of_an_earlier_version_has_no_adapters_and_is_asked_once(capsys):
    unknown = NotSupportedError("Method not found!")
    node = node_of(answers=[unknown, unknown])
    node.asked.add(LAW)
    node.forget(LAW, is_asked=False)
    await node.unload(LAW)
    assert not node.unwanted
    await node.take_step((ONE, "d"))
    assert node.steps([(ONE, "d")]) == []
    assert "decode-0: this version of the node has no adapters: Method not found!" in capsys.readouterr().out


async def test_what_a_nodes_settings_have_stays():
    node = node_of(ONE, answers=[NotAllowedError("fixed")])
    node.forget(ONE, is_asked=False)
    with pytest.raises(NotAllowedError, match="decode-0: fixed"):
        await node.unload(ONE)
    assert node.usable == {ONE}


async def test_the_calls_of_a_lost_node_end():
    node = node_of()
    node.set_link(None)
    node.link.transport.load_adapter = lambda *_: asyncio.Event().wait()
    with pytest.raises(PeerLostError):
        await node.load("sql", "d")


def test_a_name_stands_for_what_most_nodes_have():
    for reports in itertools.permutations(([TWO, LAW], [TWO], [ONE])):
        assert agreed(reports) == {"sql": TWO, "law": LAW}
    for reports in itertools.permutations(([TWO], [ONE], [LAW])):
        assert agreed(reports) == {"sql": ONE, "law": LAW}
    assert agreed([]) == {}
