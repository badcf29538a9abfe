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
from types import SimpleNamespace

import psutil
import pytest

from outrider.cli.config import ROLES
from outrider.cli.main import main, parse
from outrider.cli.sampling_arguments import with_defaults_of
from outrider.extras import EXTRAS
from outrider.own_modules import module_command, without_working_folder
from tests.support.waiting import wait_for

ROLE_PROCESS = Path(__file__).parents[1] / "cluster" / "role_process.py"
WAIT_SECONDS = 60.0
ROLE_MODULE = """
import runpy, sys
sys.argv = [{path!r}, {role!r}, *sys.argv[1:]]
runpy.run_path({path!r}, run_name="__main__")
"""
ROLE_CONFIG = """
from dataclasses import dataclass
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.kv_transfer.config import KvTransferConfig
from outrider.model_hub.config import ModelConfig
from outrider.service.config import SERVICE_SECTIONS

@dataclass(frozen=True, kw_only=True)
class Config:
    pass

NODE_SECTIONS = {{"model": ModelConfig, "kv_cache": KVCacheConfig, "kv_transfer": KvTransferConfig}}
SECTIONS = {{**NODE_SECTIONS, **SERVICE_SECTIONS, "{role}": Config}}
"""


class Up:
    """`outrider up` as a person starts it, where `router` and the other roles are stand-ins.

    It runs beside modules of somebody else's service, which have the names of ours and of the standard library's.
    """

    def __init__(self, directory: Path, *, shell: str = 'exec "$@"', **environ: str) -> None:
        """`shell`: how it is run."""
        working = directory / "my service"
        working.mkdir()
        for name in ("router", "decode_node", "queue", "token", "outrider"):
            (working / f"{name}.py").write_text("raise SystemExit('this is my service')")
        (working / "prefill_node").mkdir()
        (working / "prefill_node" / "__init__.py").write_text("raise SystemExit('this is my service')")
        for role in ROLES:
            (directory / role).mkdir()
            (directory / role / "__init__.py").touch()
            (directory / role / "__main__.py").write_text(ROLE_MODULE.format(path=str(ROLE_PROCESS), role=role))
            (directory / role / "config.py").write_text(ROLE_CONFIG.format(role=role))
        (directory / "config.json").write_text("{}")  # a model's directory, as far as `up` looks
        self.status_file = directory / "status.json"
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash",
             sys.executable, "-P", "-m", "outrider.cli.main", "up", "--port", "0", "--model", str(directory),
             "--json-status", str(self.status_file), "--set", "server.drain_seconds=60"],
            cwd=working, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(directory), **environ},
        )  # fmt: skip
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("version="):
                break

    def nodes(self) -> list[dict]:
        return json.loads(self.status_file.read_text())["nodes"]

    def wait(self) -> int:
        rest, _ = self.process.communicate(timeout=WAIT_SECONDS)
        self.lines += rest.splitlines()
        return self.process.returncode


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
        (["--set", "cluster.prefill_nodes=0"], "cluster.prefill_nodes = 0 is out of range: must be at least 1"),
        (["--set", "kv_transfer.prt=1"], "unknown key kv_transfer.prt; the nearest is kv_transfer.port"),
        (["--set", "model.dtype=int8"], "model.dtype = 'int8' is out of range"),
        (
            ["--routers", "2", "--store", "disk"],
            "--set router.store=disk: router: store is neither memory nor valkey://",
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
    """A command in a process that can import what this install has, and no more."""
    process = [sys.executable, "-c", WITHOUT, installed, *command]
    return subprocess.run(process, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


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
    assert "some-id is no file; to find its receipt, set router.receipts" in done.stderr


@pytest.mark.parametrize(
    ("installed", "command", "extra"),
    [("client", "up", "node"), ("router", "up", "node"), ("client", "top --once", "top"), ("client", "fetch", "node")],
)
def test_what_is_not_installed_is_one_line_with_the_smallest_extra(installed, command, extra):
    done = without_extras(installed, *command.split())
    assert done.returncode == 1
    assert f" is not installed: pip install 'outrider[{extra}]' brings it\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_each_extra_brings_the_modules_that_are_said_to_come_with_it():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for module, extra in EXTRAS.items():
        wanted = {"grpc_reflection": "grpcio-reflection", "opentelemetry": "opentelemetry-sdk"}.get(module, module)
        names = [re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"][extra]]
        assert wanted.replace("_", "-") in names, (module, extra)


def test_a_model_that_starts_processes_names_the_extra_too():
    code = "import sys; sys.modules['numpy'] = None; from outrider import LLM"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert "ImportError: outrider.LLM starts nodes, and" in done.stderr
    assert "pip install 'outrider[node]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "m"], "there is no command serve; `outrider up`"),
        (["up", "--prot", "3"], "unknown argument --prot; the nearest is --port"),
        (["up", "a", "b"], "unknown argument b"),
        (["up", "a", "--model", "b"], "unknown argument a"),
        (["bench", "load", "--concurency", "3"], "unknown argument --concurency; the nearest is --concurrency"),
        (["bench", "load", "--concurrency", "x"], "--concurrency: x is no number of at least 1"),
        (["bench", "load", "--rate", "1,x"], "--rate: 1,x: rates are numbers above 0"),
        (["generate", "hi", "--target", ","], "--target: a client needs at least one target"),
        (["probe", "--target", "https://h"], "--target: https://h: a target is HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as wrong:
        main(arguments)
    assert wrong.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_what_is_not_given_is_the_models_own():
    model = SimpleNamespace(default_sampling={"temperature": 0.6, "top_k": 20})
    assert with_defaults_of(model, {"top_k": 5, "seed": 1}) == {"temperature": 0.6, "top_k": 5, "seed": 1}


@pytest.mark.parametrize("arguments", [["up", "tiny"], ["up", "--port", "0", "tiny"], ["up", "tiny", "--port", "0"]])
def test_a_model_may_stand_alone(arguments):
    assert getattr(parse(arguments, "up"), "model.id") == "tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
        (["--choice", "a", "--regex", "b"], "regex and choice: an answer has one constraint"),
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
    """Its reader is there and never reads."""
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
        'exec "$@" >/dev/full 2>&1',
        'exec "$@" >&- 2>&-',
        'exec "$@" > >(head -3) 2>&1',
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


def test_config_prints_every_section_with_sources(capsys, tmp_path, monkeypatch):
    file = tmp_path / "outrider.yaml"
    file.write_text("router:\n  max_waiting: 5\n")
    monkeypatch.setenv("OUTRIDER_TELEMETRY__LOG_LEVEL", "debug")
    assert main(["config", "--config", str(file), "--set", "decode_node.max_running_sequences=3"]) == 0
    shown = capsys.readouterr().out
    assert f"  max_waiting: 5  # {file}:2" in shown
    assert "  log_level: debug  # environment variable OUTRIDER_TELEMETRY__LOG_LEVEL" in shown
    assert "  max_running_sequences: 3  # --set decode_node.max_running_sequences=3" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    monkeypatch.delenv("OUTRIDER_TELEMETRY__LOG_LEVEL")
    assert main(["config", "--config", str(again)]) == 0


def test_an_unknown_command_and_help(capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["generat"])
    assert wrong.value.code == 2
    with pytest.raises(SystemExit) as helped:
        main(["--help"])
    assert helped.value.code == 0
    assert "start a local cluster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--top-k", "-1"], "sampling.top_k: Value out of range: -1"),
        (["load", "--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: No such file or directory"),
        (["compare", "--prompts", "/nowhere/prompts.jsonl"], "No such file or directory"),
        (["compare", "--tls", "certificates"], "omit the TLS flags"),
    ],
)
def test_bench_says_what_cannot_work_before_it_starts(capsys, arguments, message):
    assert main(["bench", *arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
