"""`outrider up` with stand-ins for the four roles, and the commands that talk to it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest

from outrider.cli.main import main
from outrider.extras import EXTRAS
from outrider.own_modules import module_command, without_working_folder
from tests.cli.up_process import WAIT_SECONDS, Up
from tests.support.processes import run_python
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    up = Up(tmp_path_factory.mktemp("up"))
    yield up
    if up.process.poll() is None:
        up.process.send_signal(signal.SIGINT)
        assert up.wait() == 0


@pytest.fixture
def target(up):
    (address,) = (line.removeprefix("serving on ") for line in up.lines if line.startswith("serving on "))
    return f"--target={address}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--draft", "guess"],
            "--draft guess: cluster: draft must be one of ngram, suffix, draft_model:MODEL, head:DIR, none",
        ),
        (["--set", "cluster.decode_nodes=0"], "cluster.decode_nodes = 0 is out of range: must be at least 1"),
        (["--set", "kv_transfer.prt=1"], "unknown key kv_transfer.prt; the nearest is kv_transfer.port"),
        (["--set", "model.dtype=int8"], "model.dtype = 'int8' is out of range"),
        (
            ["--routers", "2", "--store", "disk"],
            "--set router.store=disk: router: store must be memory or valkey://",
        ),
    ],
)
def test_up_refuses_a_wrong_setting_of_any_role_before_it_starts_one(capsys, arguments, message):
    assert main(["up", "--port", "0", *arguments]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert "starting" not in shown.out


def test_up_tells_its_story_and_the_status_file_matches(up, target):
    order = [next(index for index, line in enumerate(up.lines) if line.startswith(word)) for word in (
        "outrider 0", "draft-0    starting", "prefill-0  starting", "router     starting", "serving on",
        "numerics: exact (echo)", "native kernels: echo", "version=",
    )]  # fmt: skip
    assert order == sorted(order)
    status = json.loads(up.status_file.read_text())
    assert f"--target={status['router']}" == target
    assert [node["name"] for node in status["nodes"]] == ["draft-0", "prefill-0", "decode-0", "router"]
    assert all(psutil.pid_exists(node["pid"]) for node in status["nodes"])


def test_up_says_where_the_routers_page_is(up):
    (page,) = (line.removeprefix("page: ") for line in up.lines if line.startswith("page: "))
    (router,) = (node for node in json.loads(up.status_file.read_text())["nodes"] if node["role"] == "router")
    assert page == f"http://{router['metrics_address']}/"


def test_generate_streams_text_from_the_router_that_is_there(target, capsys):
    several = f"--target=127.0.0.1:1,{target.removeprefix('--target=')}"
    assert main(["generate", "one two three", several, "--stats"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "one two three\n"
    assert "3 tokens" in shown.err
    assert "seed 7" in shown.err


def test_generate_answers_with_json(target, capsys):
    assert main(["generate", "one two", target, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["samples"] == [
        {"sample": 0, "text": "one two", "token_ids": [100, 101], "finish_reason": "stop", "stop_string": None,
         "stop_token_id": 2}
    ]  # fmt: skip
    assert answer["usage"]["num_generated_tokens"] == 2


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ("full", "too many requests wait")])
def test_an_error_is_one_clear_line_and_status_1(target, capsys, prompt, message):
    assert main(["generate", prompt, target]) == 1
    assert capsys.readouterr().err == f"outrider generate: {message}\n"


WITHOUT = """
import sys
from outrider.extras import EXTRAS
for module, extra in EXTRAS.items():
    if extra != "router" or sys.argv[1] == "client":
        sys.modules[module] = None
from outrider.cli.main import main, parse
from outrider.extras import EXTRAS
sys.exit(main(sys.argv[2:]))
"""


def without_extras(installed, *command):
    """Runs a command in a process that can import only the packages of this install."""
    return run_python("-c", WITHOUT, installed, *command)


@pytest.mark.parametrize("installed", ["client", "router"])
def test_commands_that_start_no_service_need_no_more_than_a_client(target, tmp_path, installed):
    file = tmp_path / "vllm.yaml"
    file.write_text("max-num-seqs: 3\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "kind": "text", "text": "hi"}))
    for command in (
        ("config",),
        ("config", "schema"),
        ("config", "import", str(file)),
        ("probe", target),
        ("generate", "hi", target, "--json"),
        ("bench", "load", f"--prompts={prompts}", "--concurrency=1", "--max-tokens=2", target),
    ):
        done = without_extras(installed, *command)
        assert (done.returncode, done.stdout != "") == (0, True), done
    done = without_extras(installed, "replay", "some-id", target.replace("--target", "--against"))
    assert "some-id is not a file; to find its receipt, set router.receipts" in done.stderr


@pytest.mark.parametrize(
    ("installed", "command", "extra"),
    [("client", "up", "node"), ("router", "up", "node"), ("client", "top --once", "top"), ("client", "fetch", "node")],
)
def test_what_is_not_installed_is_one_line_with_the_smallest_extra(installed, command, extra):
    done = without_extras(installed, *command.split())
    assert done.returncode == 1
    assert f" is not installed: pip install 'outrider[{extra}]' brings it\n" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("role", ["router", "prefill_node", "decode_node", "draft_node"])
def test_a_role_whose_extra_is_not_installed_is_one_line_too(role):
    start = "import runpy\nrunpy.run_module(sys.argv[2], run_name='__main__')"
    script = WITHOUT.replace("from outrider.cli.main import main, parse\n", "").replace(
        "sys.exit(main(sys.argv[2:]))", start
    )
    done = run_python("-c", script, "client", role)
    extra = "router" if role == "router" else "node"
    assert done.returncode == 1
    assert done.stderr.startswith(f"{role}: ")
    assert done.stderr.endswith(f" is not installed: pip install 'outrider[{extra}]' brings it\n")
    assert done.stderr.count("\n") == 1


def test_each_extra_brings_the_modules_that_are_said_to_come_with_it():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for module, extra in EXTRAS.items():
        wanted = {
            "grpc_reflection": "grpcio-reflection",
            "opentelemetry": "opentelemetry-api",
            "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-grpc",
        }.get(module, module.replace(".", "-"))
        names = [re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"][extra]]
        assert wanted.replace("_", "-") in names, (module, extra)


def test_a_model_that_starts_processes_names_the_extra_too():
    done = run_python("-c", "import sys; sys.modules['numpy'] = None; from outrider import LLM")
    assert "ImportError: outrider.LLM starts nodes, and" in done.stderr
    assert "pip install 'outrider[node]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
        (["--choice", "a", "--regex", "b"], "regex and choice: only one constraint is allowed"),
        (["--chat", "--stop", "\udcff"], "stop.strings: "),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(target, capsys, arguments, message):
    assert main(["generate", "hi", target, *arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "closed"),
    [("generate hi", "> /dev/full"), ("generate hi --json", "> /dev/full"), ("config", "> /dev/full"),
     ("config", "> /dev/full 2>&1"), ("generate hi", ">&-"), ("generate hi", "2>&-"), ("chat", "<&-")],
)  # fmt: skip
def test_an_output_that_takes_nothing_is_one_line(target, command, closed):
    name, *others = command.split()
    call = [sys.executable, "-m", "outrider.cli.main", name, *others, *([target] if name != "config" else [])]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *call], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == ("/dev/full" in closed), done
    assert "Traceback" not in done.stderr + done.stdout
    if closed == "> /dev/full":
        assert done.stderr == f"outrider {name}: No space left on device\n"


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape", "ascii"])
def test_bytes_that_are_no_text_are_one_line(target, encoding):
    for command in ("chat", "generate -", "generate - --chat"):
        name, *others = command.split()
        done = subprocess.run(
            [sys.executable, "-m", "outrider.cli.main", name, *others, target],
            input=b"hi\xff\n", capture_output=True, timeout=WAIT_SECONDS, check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr
        assert b"hi" not in done.stdout
        assert done.stderr.count(b"\n") == (2 if name == "chat" else 1), done


def test_ctrl_c_ends_generate_with_130(target):
    command = [sys.executable, "-m", "outrider.cli.main", "generate", "forever", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(7) == b"forever"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_ctrl_c_while_a_command_is_still_being_imported_is_no_traceback(capsys, monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.main.importlib.import_module", interrupt)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "\n"


def test_chat_keeps_the_conversation_until_its_end(target, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/help\n/reset\n/exit\n"))
    assert main(["chat", target]) == 0
    shown = capsys.readouterr()
    assert "echo on" in shown.err
    assert shown.err.count("/reset clears") == 2


def test_up_restarts_a_node_and_ends_with_0_and_without_its_file(up):
    status = json.loads(up.status_file.read_text())
    pid = next(node["pid"] for node in status["nodes"] if node["name"] == "draft-0")
    os.kill(pid, signal.SIGKILL)
    for line in up.process.stdout:
        up.lines.append(line.rstrip())
        if line.startswith("draft-0    serving"):
            break
    assert "draft-0    died by SIGKILL; restarts now" in up.lines
    up.process.send_signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not up.status_file.exists()
    assert up.lines.count("router     ended with status 0") == 1
    pids = [node["pid"] for node in status["nodes"]]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
def full_pipe(tmp_path):
    """Returns a pipe whose reader never reads."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"x" * 4096)
    yield path
    os.close(descriptor)


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param('exec "$@" >/dev/full 2>&1', marks=pytest.mark.full),
        'exec "$@" >&- 2>&-',
        pytest.param('exec "$@" > >(head -3) 2>&1', marks=pytest.mark.full),
        'exec "$@" >$FULL_PIPE 2>&1',
    ],
    ids=["a full disk", "closed", "head -3", "a reader that is stopped"],
)
def test_up_serves_and_restarts_nodes_whatever_becomes_of_its_output(tmp_path, full_pipe, shell):
    up = Up(tmp_path, shell=shell, FULL_PIPE=str(full_pipe))
    try:
        wait_for(up.status_file.exists)
        (first,) = (node["pid"] for node in up.nodes() if node["name"] == "draft-0")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: all(node["state"] == "serving" and node["pid"] != first for node in up.nodes()))
        pids = [node["pid"] for node in up.nodes()]
    finally:
        up.process.send_signal(signal.SIGTERM)
    assert up.wait() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_second_signal_ends_up_at_once_with_its_own_status(tmp_path):
    up = Up(tmp_path)
    (router,) = (node["pid"] for node in up.nodes() if node["name"] == "router")
    os.kill(router, signal.SIGSTOP)
    up.process.send_signal(signal.SIGTERM)
    for line in up.process.stdout:
        if line.startswith("router     stopping"):
            break
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 128 + signal.SIGINT
    assert not psutil.pid_exists(router)


@pytest.mark.parametrize("environ", [{}, {"PYTHONPATH": "."}, {"PYTHONPATH": ":"}], ids=["", ".", "empty"])
def test_what_lies_in_the_working_folder_is_not_taken_for_a_service(tmp_path, environ, monkeypatch):
    for name in ("router.py", "queue.py", "outrider.py"):
        (tmp_path / name).write_text("raise SystemExit('this is my service')")
    monkeypatch.chdir(tmp_path)
    started = subprocess.run(
        [*module_command("router"), "--help"],
        env=without_working_folder({**os.environ, **environ}), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    assert "--set" in started.stdout


def test_a_search_path_outlives_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert without_working_folder({"PYTHONPATH": f".:{tmp_path}:", "A": "b"}) == {"PYTHONPATH": str(tmp_path), "A": "b"}
