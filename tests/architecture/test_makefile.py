"""Which Python and which environment `make` chooses. It prints its commands instead of running them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def put_python(path, version, *, runs=True):
    """Writes a command that claims to be this version of Python, or fails, like a pyenv shim with no version set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    says = f'if [ "$1" = -V ]; then echo Python {version}.1; else echo {version}; fi'
    path.write_text(f"#!/bin/sh\n{says if runs else 'exit 127'}\n")
    path.chmod(0o755)


@pytest.fixture
def make(tmp_path):
    """make(*arguments) → (exit status, output), in a folder with the Makefile and, at first, no Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock", "requirements-node.lock"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "grep", "make"):
        (tools / name).symlink_to(shutil.which(name))
    environ = {"PATH": str(tools), "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)}

    def run(*arguments):
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def environment_of(output):
    """Returns (the Python that creates the environment, the environment's folder)."""
    (line,) = [line for line in output.splitlines() if " -m venv " in line]
    return line.split()[-4], line.split()[-1]


def test_an_environment_is_of_the_python_that_is_asked_for(make, tmp_path):
    for version in ("3.11", "3.12"):
        put_python(tmp_path / "bin" / f"python{version}", version)
    assert environment_of(make("setup")[1]) == ("python3.11", ".venv")
    assert environment_of(make("PYTHON=python3.12", "setup")[1]) == ("python3.12", ".venv")


def test_an_environment_of_another_python_is_left_alone(make, tmp_path):
    for version in ("3.11", "3.12"):
        put_python(tmp_path / "bin" / f"python{version}", version)
    put_python(tmp_path / ".venv" / "bin" / "python", "3.11")
    assert environment_of(make("PYTHON=python3.12", "test")[1]) == ("python3.12", ".venv-3.12")
    assert environment_of(make("PYTHON=python3.11", "test")[1])[1] == ".venv"
    put_python(tmp_path / ".venv" / "bin" / "python", "3.12")
    assert environment_of(make("test")[1])[1] == ".venv", "who asks for none has the one that is there"
    assert environment_of(make("PYTHON=python3.11", "VENV=other", "test")[1])[1] == "other"


def test_pyenvs_versions_are_found_though_its_commands_do_not_run(make, tmp_path):
    put_python(tmp_path / "bin" / "python3.12", "3.12", runs=False)
    chosen = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3.12"
    put_python(chosen, "3.12")
    assert environment_of(make("PYTHON=python3.12", "setup")[1]) == (str(chosen), ".venv")
    assert environment_of(make("setup")[1]) == (str(chosen), ".venv"), "the only one that runs"


def test_a_python_that_is_not_there_is_an_error(make):
    status, output = make("PYTHON=python3.19", "setup")
    assert (status, "PYTHON=python3.19: there is no such command that runs" in output) == (2, True)
    status, output = make("setup")
    assert (status, "none of python3.11 python3.12 python3.13 is here" in output) == (2, True)


def test_another_version_is_tested_where_there_is_one(make, tmp_path):
    put_python(tmp_path / "bin" / "python3.11", "3.11")
    put_python(tmp_path / ".venv" / "bin" / "python", "3.11")
    left_out = "make test-python: left out, as none of python3.13 python3.12 runs here"
    assert left_out in make("test-python")[1].splitlines()
    put_python(tmp_path / "bin" / "python3.12", "3.12")
    output = make("test-python")[1]
    assert left_out not in output.splitlines()
    assert "python3.12 -m venv .venv-3.12" in output
    assert ".venv-3.12/bin/python -m pytest" in output
