"""Fault points: what the variable means, that it really kills processes, and that code and list agree."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.faults import FAULT_POINTS, FAULTS_VARIABLE, ONCE_VARIABLE, fault_point, parse_faults

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 30.0
PROGRAM = """
import sys
from outrider.faults import fault_point
for point in sys.argv[1:]:
    fault_point(point)
    print(point, flush=True)
"""


def parsed(text, **more):
    return parse_faults({FAULTS_VARIABLE: text, **more})


def start(faults, *points, once=""):
    environ = {**os.environ, FAULTS_VARIABLE: faults, ONCE_VARIABLE: once}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *points],
        env=environ,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def outcome(faults, *points, once=""):
    """Returns (exit status, points passed)."""
    process = start(faults, *points, once=once)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out.split()


def test_nothing_is_asked_for_by_default():
    assert parsed("") == parsed(" ; ") == {}
    assert fault_point("decode.granted") is None


def test_each_part_names_a_point_a_time_and_an_action():
    faults = parsed("decode.granted=kill; prefill.before_commit:2=stop;decode.step:*=delay:50;draft.hello = hang")
    assert [(fault.point, fault.nth, fault.action, fault.delay_seconds) for fault in faults.values()] == [
        ("decode.granted", 1, "kill", 0.0),
        ("prefill.before_commit", 2, "stop", 0.0),
        ("decode.step", None, "delay", 0.05),
        ("draft.hello", 1, "hang", 0.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode.grant=kill", "decode.granted is one"),
        ("nonsense=kill", "no fault point 'nonsense'"),
        ("decode.granted", "is not POINT"),
        ("decode.granted=explode", "kill, stop, hang, hold, delay:MS"),
        ("decode.granted=hold", "needs OUTRIDER_FAULTS_ONCE"),
        ("decode.granted=delay", "is not POINT"),
        ("decode.granted=delay:soon", "is not POINT"),
        ("decode.granted=kill:3", "is not POINT"),
        ("decode.granted:0=kill", "neither a number from 1 nor"),
        ("decode.granted:often=kill", "neither a number from 1 nor"),
        ("decode.granted=kill;decode.granted:2=stop", "is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        parsed(text)


def test_a_role_does_not_start_with_a_fault_that_makes_no_sense(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_role_arguments("decode_node", {}, [], environ={FAULTS_VARIABLE: "decode.grant=kill"})
    assert ended.value.code == 2
    assert "decode_node: OUTRIDER_FAULTS: there is no fault point 'decode.grant'" in capsys.readouterr().err


def test_a_process_is_killed_the_nth_time():
    faults = "decode.step:3=kill"
    status, passed = outcome(faults, "decode.step", "decode.granted", "decode.step", "decode.step", "decode.done")
    assert (status, passed) == (-signal.SIGKILL, ["decode.step", "decode.granted", "decode.step"])


def test_a_fault_happens_once_over_restarts_each_for_itself(tmp_path):
    once = str(tmp_path / "happened")
    faults = "decode.step=kill;decode.done=kill"
    assert outcome(faults, "decode.step", once=once)[0] == -signal.SIGKILL
    assert outcome(faults, "decode.step", once=once) == (0, ["decode.step"])
    assert outcome(faults, "decode.step", "decode.done", once=once) == (-signal.SIGKILL, ["decode.step"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["happened.decode.done", "happened.decode.step"]


def test_a_stopped_process_goes_on_when_it_is_continued():
    process = start("decode.step=stop", "decode.step")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert (out, err) == ("decode.step\n", "fault decode.step: stop\n")


def test_a_hang_blocks_one_thread_for_good():
    process = start("decode.step=hang", "decode.granted", "decode.step", "decode.done")
    try:
        assert process.stderr.readline() == "fault decode.step: hang\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    finally:
        process.kill()
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert out == "decode.granted\n"


def test_a_thread_is_held_where_a_test_has_armed_the_point(tmp_path):
    once, file = str(tmp_path / "held"), tmp_path / "held.decode.step"
    assert outcome("decode.granted:*=hold", "decode.step", once=once) == (0, ["decode.step"])
    file.touch()
    assert outcome("decode.step:*=hold", "decode.step", once=once) == (0, ["decode.step"])
    file.unlink()
    process = start("decode.step:*=hold", "decode.step", "decode.step", once=once)
    try:
        assert process.stderr.readline() == "fault decode.step: hold\n"
        file.unlink()  # the process passes the point once; the point stays armed
        assert process.stderr.readline() == "fault decode.step: hold\n"
        assert file.read_text() == str(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        file.write_text("")
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def test_a_delay_comes_every_time(capsys):
    fault = parsed("decode.step:*=delay:1")["decode.step"]
    for _ in range(3):
        fault.reach()
    assert capsys.readouterr().err == "fault decode.step: delay\n" * 3


def placed_points():
    """Yields the point of every call of `fault_point` in the services and in the shared package."""
    for folder in ("outrider", "router", "prefill_node", "decode_node", "draft_node"):
        texts = (path.read_text() for path in (ROOT / folder).rglob("*.py"))
        for text in filter(lambda text: "fault_point(" in text, texts):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                    for constant in ast.walk(node.args[0]):
                        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                            yield constant.value


def test_the_points_in_the_code_are_those_of_the_list():
    placed = list(placed_points())
    assert set(FAULT_POINTS) == set(placed)
