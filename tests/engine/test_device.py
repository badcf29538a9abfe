"""The choice of a device, and when it asks torch whether there is a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from outrider.engine import device
from outrider.engine.device import has_gpu_driver
from outrider.model_hub.kernels import resolve_device


@pytest.fixture
def no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "DRIVER_LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setattr(device, "AMD_DRIVER", tmp_path / "kfd")


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_auto_is_the_cpu_and_torch_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert not has_gpu_driver()
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("is_amd", [False, True])
@pytest.mark.parametrize(("is_available", "found"), [(True, "cuda"), (False, "cpu")])
def test_with_a_driver_torch_decides(monkeypatch, is_amd, is_available, found):
    if is_amd:
        device.AMD_DRIVER.touch()
    else:
        monkeypatch.setattr(device, "DRIVER_LIBRARY", "libc.so.6")
    monkeypatch.setattr(device, "version", lambda _name: "2.13.0+cu130")
    asked = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: is_available))
    monkeypatch.setitem(sys.modules, "torch", asked)
    assert has_gpu_driver()
    assert resolve_device("auto") == found


def test_a_torch_that_was_built_for_cpus_finds_no_gpu(monkeypatch):
    monkeypatch.setattr(device, "DRIVER_LIBRARY", "libc.so.6")
    monkeypatch.setattr(device, "version", lambda _name: "2.13.0+cpu")
    assert not has_gpu_driver()


def test_without_torch_it_is_asked_for(monkeypatch):
    """A machine with a GPU then reports that torch is missing, instead of computing on its processors."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(device, "DRIVER_LIBRARY", "libc.so.6")
    monkeypatch.setattr(device, "version", missing)
    assert has_gpu_driver()
