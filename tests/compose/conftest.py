"""Fixtures of all tests in containers: the image, and a volume with the model.

Only `make compose-test` runs these tests: they build the image and start whole clusters.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess

import pytest

from tests.compose.project import BUILD_SECONDS, IMAGE_TAG, ROOT, START_SECONDS, docker

MARK = "compose"


@functools.cache
def reason_not_to_run() -> str:
    """Returns why the tests cannot run; empty if a Docker engine with Compose responds."""
    if shutil.which("docker") is None:
        return "no docker command here"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if tried.returncode != 0:
            return f"{' '.join(command)} failed: {tried.stderr.strip().splitlines()[-1:]}"
    return ""


def pytest_collection_modifyitems(config, items):
    """Skips these tests without `-m compose`, since they build images and start containers."""
    mine = [item for item in items if item.get_closest_marker(MARK)]
    if not mine:
        return
    is_asked_for = MARK in config.getoption("markexpr").split()
    reason = reason_not_to_run() if is_asked_for else "`make compose-test` runs the tests in containers"
    if reason:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def image():
    """Builds the image from this tree; unchanged layers come from the engine's build cache."""
    command = ["docker", "compose", "--progress", "plain", "build"]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False,
        env={**os.environ, "OUTRIDER_TAG": IMAGE_TAG},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-8000:]
    return f"outrider:{IMAGE_TAG}"


@pytest.fixture(scope="session")
def models(image):
    """A volume with the default model, for projects that do not test its download."""
    name = f"outrider-test-models-{secrets.token_hex(3)}"
    docker("volume", "create", name)
    try:
        docker(
            "run", "--rm", "--volume", f"{name}:/var/lib/outrider", image, "outrider", "fetch", timeout=START_SECONDS
        )
        yield name
    finally:
        docker("volume", "rm", "--force", name)
