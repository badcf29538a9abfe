"""Scripts that end in several ways leave no process behind."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from outrider.client import Client
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
ROLE_PROCESS = ROOT / "tests" / "cluster" / "role_process.py"
WAIT_SECONDS = 60.0
STAND_INS = f"""
import functools, sys
import psutil
import outrider.llm.llm as module
def with_stand_ins(launch, locate_model, **options):
    command = lambda role: [sys.executable, {str(ROLE_PROCESS)!r}, role]
    return launch(command=command, locate_model=False, **options)
module.Launch = functools.partial(with_stand_ins, module.Launch)
llm = module.LLM()
children = psutil.Process().children(recursive=True)
print(*(child.pid for child in children), flush=True)
"""


def wait_until_gone(pids):
    running = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(running, timeout=WAIT_SECONDS)
    assert alive == []


@pytest.mark.parametrize(
    ("end", "status", "complaint"),
    [
        ("", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os._exit(3)", 3, ""),
    ],
)
def test_a_script_ends_with_its_processes(end, status, complaint, tmp_path):
    script = run_python("-c", f"{STAND_INS}\n{end}", cwd=tmp_path)
    assert script.returncode == status, script.stderr
    assert script.stderr.count("Traceback") == (complaint != "")
    assert complaint in script.stderr
    pids = list(map(int, script.stdout.split()))
    assert len(pids) == 4
    wait_until_gone(pids)


SCRIPT = """
import json, sys
import psutil
from outrider import LLM, SamplingParams, StructuredOutputsParams
from outrider.client import Client

llm = LLM(draft="ngram", settings=json.loads(sys.argv[1]))
say = lambda **values: print(json.dumps(values), flush=True)
say(router=llm._target, pids=[child.pid for child in psutil.Process().children(recursive=True)])
prompts = ["The capital of France is", "Once upon a time", "def is_prime(n):", "One, two, three,"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
say(prompts=prompts, texts=[output.outputs[0].text for output in outputs])
sys.stdin.readline()
endless = SamplingParams(max_tokens=7000, ignore_eos=True)
try:
    llm.generate(prompts * 30, endless)
except KeyboardInterrupt:
    say(interrupted=True)
sys.stdin.readline()
say(text=llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text)
constrained = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
say(answer=llm.chat([{"role": "user", "content": "Is it?"}], constrained)[0].outputs[0].text)
llm.generate(prompts * 30, endless)
"""


@pytest.mark.full  # the test above does the same with fake services
@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_a_script_with_the_default_model_is_interrupted_and_killed(tmp_path):
    """The script's answers equal the router's, Ctrl-C aborts running requests, and kill -9 ends all processes."""
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        command = [sys.executable, "-c", SCRIPT, json.dumps({"kv_cache.memory": "512MiB"})]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=tmp_path
        ) as script:
            try:
                follow(script)
            finally:
                script.kill()
    assert script.wait(WAIT_SECONDS) == -signal.SIGKILL
    said = log.read_text()
    assert "tokens/s" in said
    assert "Traceback" not in said


def follow(script):
    lines = map(json.loads, iter(functools.partial(script.stdout.readline), ""))
    started = next(lines)
    assert len(started["pids"]) == 4
    answered = next(lines)
    with Client(started["router"]) as client:
        expected = [client.complete(prompt, temperature=0.0, max_tokens=12).text for prompt in answered["prompts"]]
        assert answered["texts"] == expected
        go_on(script)
        wait_for(client, lambda status: status.num_requests_running > 0)
        script.send_signal(signal.SIGINT)
        assert next(lines) == {"interrupted": True}
        wait_for(client, is_idle)
        go_on(script)
        assert next(lines) == {"text": expected[0]}
        assert next(lines)["answer"] in ("yes", "no")
        wait_for(client, lambda status: status.num_requests_running > 0)
    script.kill()
    wait_until_gone(started["pids"])


def go_on(script):
    script.stdin.write("\n")
    script.stdin.flush()


def wait_for(client, condition):
    deadline = time.monotonic() + WAIT_SECONDS
    with contextlib.closing(client.watch_cluster(interval_seconds=0.1)) as statuses:
        assert any(condition(status) for status in statuses if time.monotonic() < deadline or pytest.fail("too late"))


def is_idle(status):
    return not status.num_requests_running + status.num_requests_waiting and all(
        node.load.num_running == 0 and node.load.kv_blocks_free == node.load.kv_blocks_total for node in status.nodes
    )
