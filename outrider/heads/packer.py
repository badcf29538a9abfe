"""`python -m outrider.heads.packer`: packs a model and its head for `outrider.model_hub.packed_weights`.

It reads a pickled ModelConfig from standard input and writes a line for each step of progress to standard output.
"""

from __future__ import annotations

import os
import pickle
import sys

from outrider.errors import OutriderError
from outrider.lossy_stream import guard_standard_streams
from outrider.model_hub import packed_weights
from outrider.model_hub.config import ModelConfig


def main() -> int:
    """Packs model and head. Returns the exit status: 1 if one cannot be packed; the parent process then says why."""
    guard_standard_streams()
    config: ModelConfig = pickle.load(sys.stdin.buffer)  # noqa: S301 from the process that started this one
    steps = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that output of libraries is not read as progress
    from outrider.heads.of_target import TargetHead
    from outrider.model_hub.open import open_model

    packed_weights.is_packer = True

    try:
        model = open_model(config, progress=lambda *step: print("step", *step, file=steps))
        TargetHead(config).packed(model)
    except OutriderError:
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # skips torch's shutdown, which takes a second
