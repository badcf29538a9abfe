"""Packing in a process of its own, whose memory goes with it, that for torch too: native nodes run without torch."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

from outrider.model_hub.config import ModelConfig
from outrider.model_hub.progress import Progress
from outrider.own_modules import module_command, tied

PACKER = "outrider.heads.packer"
"""What it runs: packs a model and its head, whose code this package does not import."""


packs_here = False
"""Set by that process itself."""


def pack_apart(config: ModelConfig, progress: Progress) -> None:
    """Lets another process pack what `config` names; returns when it has ended.

    A process that has torch anyway packs by itself. So it does what the other one could not, and says why it cannot.
    """
    if packs_here or "torch" in sys.modules:
        return
    try:
        with subprocess.Popen(  # noqa: S603 our own interpreter
            tied(module_command(PACKER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as packer:
            assert packer.stdin is not None
            assert packer.stdout is not None
            with packer.stdin as to:
                to.write(pickle.dumps(config))
            for line in packer.stdout:
                said = re.fullmatch(rb"step (\w+) (\d+) (\d+)\n", line)
                if said is not None:  # else printed by what the interpreter starts with
                    progress(said[1].decode(), int(said[2]), int(said[3]))
        problem = f"status {packer.returncode}" if packer.returncode else ""
    except OSError as error:  # no process can be started, or it has ended before it read what to pack
        problem = str(error)
    if problem:
        sys.stderr.write(f"{PACKER} failed ({problem}): this process packs by itself\n")
