"""Compares the public contract, router.proto, with the one that was released last, and fails on what breaks a client.

`protos/released/VERSION` holds the contract of each release: a clone without tags, as CI makes
them, compares as well as any other. Where the tags are there, the last one must have its copy,
and every copy must be what its tag holds. `--release` writes the copy for the version that is
about to be tagged.

Internal protos are not compared: what two nodes speak is agreed in their hellos
(`outrider/protocol_versions.py`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider import __version__

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = Path("outrider/v1/router.proto")
BUF = Path(sys.executable).parent / "buf"
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")

Version = tuple[int, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help=f"write the contract of {__version__}")
    if parser.parse_args().release:
        write_copy(ROOT, __version__)
        return 0
    mistakes = differing_copies(ROOT)
    for mistake in mistakes:
        print(f"wire contract: {mistake}")
    breaks = not is_compatible(ROOT)
    return 1 if mistakes or breaks else 0


def is_compatible(root: Path) -> bool:
    """Whether a client of the last release can talk to this tree. Raises: SystemExit when nothing was released."""
    released = copies(root)
    if not released:
        raise SystemExit("wire contract: protos/released is empty; it holds the contract of each release")
    version, folder = max(released.items())
    with tempfile.TemporaryDirectory() as outside:  # buf takes no part of this tree's own module
        shutil.copytree(folder, outside, dirs_exist_ok=True)
        status = subprocess.run([BUF, "breaking", "--against", outside], cwd=root, check=False).returncode
    print(f"wire contract: {'compatible with' if status == 0 else 'BREAKS'} release {text_of(version)}")
    return status == 0


def differing_copies(root: Path) -> list[str]:
    """What is wrong with protos/released, seen from the tags of this clone."""
    released, tagged = copies(root), tags(root)
    mistakes = []
    if tagged and max(tagged) not in released:
        mistakes.append(f"release {text_of(max(tagged))} is tagged and has no copy in protos/released")
    for version, folder in released.items():
        if version in tagged:
            shown = git(root, "show", f"{tagged[version]}:protos/{PUBLIC}")
            if shown != (folder / PUBLIC).read_bytes():
                mistakes.append(f"protos/released/{text_of(version)} is not what the tag {tagged[version]} holds")
    return mistakes


def write_copy(root: Path, version: str) -> None:
    """Raises: SystemExit when the version has been released with another contract."""
    copy = root / "protos" / "released" / version / PUBLIC
    contract = (root / "protos" / PUBLIC).read_bytes()
    if copy.exists() and copy.read_bytes() != contract and parsed(version) in tags(root):
        raise SystemExit(f"wire contract: {version} is released; raise outrider.__version__ first")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(contract)
    print(f"wire contract: wrote {copy.relative_to(root)}")


def copies(root: Path) -> dict[Version, Path]:
    found = {parsed(path.name): path for path in (root / "protos" / "released").glob("*")}
    return {version: path for version, path in found.items() if version is not None}


def tags(root: Path) -> dict[Version, str]:
    """The release tags that this clone has; none outside of git."""
    try:
        names = git(root, "tag", "--list").decode().split()
    except (subprocess.CalledProcessError, FileNotFoundError):
        return {}
    found = {parsed(name): name for name in names}
    return {version: name for version, name in found.items() if version is not None}


def parsed(name: str) -> Version | None:
    match = VERSION.fullmatch(name)
    return tuple(map(int, match.groups())) if match else None


def text_of(version: Version) -> str:
    return ".".join(map(str, version))


def git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True).stdout


if __name__ == "__main__":
    sys.exit(main())
