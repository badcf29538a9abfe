"""Adds the native kernels to the build; everything else about the package is in pyproject.toml.

Without a C++ compiler the package is an ordinary pure one, and nodes say at start why
they run without native kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("outrider", "engine", "cpu_kernels")


def load_build_script() -> ModuleType:
    """`outrider.engine.cpu_kernels.build` by its file: the package itself cannot be imported here."""
    spec = importlib.util.spec_from_file_location("build_cpu_kernels", ROOT / PACKAGE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


kernels = load_build_script()


class BuildKernels(Command):
    """Compiles into the wheel, or beside the sources for an editable install (setuptools' SubCommand protocol)."""

    description = "compile the native CPU kernels"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        folder = self._folder()
        try:
            manifest = kernels.ensure_built(folder)
        except kernels.CompileError as error:
            # Somebody else's compiler: the package works without, slower, and says why.
            self.warn(str(error))
            manifest = kernels.record_absence(folder, f"the sources did not compile: {kernels.first_error(str(error))}")
        self.announce(kernels.describe(manifest), level=3)

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted(kernels.SOURCE.glob("*.*"))]

    def get_outputs(self) -> list[str]:
        return [str(path) for path in sorted(self._folder().glob("*"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _folder(self) -> Path:
        assert self.build_lib is not None
        return (ROOT if self.editable_mode else Path(self.build_lib)) / PACKAGE / "libraries"


class Build(build):
    sub_commands: ClassVar[list] = [*build.sub_commands, ("build_kernels", None)]


class KernelDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one kind of machine only."""
        return kernels.find_compiler() is not None


class BdistWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3: the libraries know nothing of Python."""
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


setup(
    distclass=KernelDistribution,
    cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": BdistWheel},
)
