"""Tags a wheel that carries native kernels with its platform; everything else about the package is in pyproject.toml.

Nothing is compiled here. Kernels are in the wheel where they were built beside their
sources (`python -m outrider.engine.cpu_kernels.build`); without them the wheel is a pure
one, and a node compiles what it needs when it first starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build's own environment holds nothing but setuptools

from outrider.engine.cpu_kernels.build import LIBRARIES, read_manifest
from outrider.engine.cpu_kernels.compiler import source_hash


class KernelDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one kind of machine only."""
        manifest = read_manifest(LIBRARIES)
        return manifest is not None and bool(manifest.built)


class BdistWheel(bdist_wheel):
    def run(self) -> None:
        """Raises SystemExit for kernels that nodes would refuse."""
        manifest = read_manifest(LIBRARIES)
        if manifest is not None and manifest.source_hash != source_hash():
            raise SystemExit(
                f"the kernels in {LIBRARIES} are not made of the sources beside them: build them again "
                f"(python -m outrider.engine.cpu_kernels.build), or delete the folder"
            )
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3: the libraries know nothing of Python."""
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


setup(distclass=KernelDistribution, cmdclass={"bdist_wheel": BdistWheel})
