from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "tag.gpgsign=false")
CONTRACT = 'syntax = "proto3";\npackage outrider.v1;\nmessage Answer {\n  string text = 1;\n}\n'
BROKEN = CONTRACT.replace("text", "words")
GROWN = CONTRACT.replace("  string text = 1;\n", "  string text = 1;\n  string more = 2;\n")


@pytest.fixture(scope="module")
def wire_contract():
    spec = importlib.util.spec_from_file_location("wire_contract", ROOT / "checks" / "wire_contract.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """A repository with a contract and nothing released."""
    write(tmp_path, CONTRACT)
    (tmp_path / "buf.yaml").write_bytes((ROOT / "buf.yaml").read_bytes())
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def write(tree, contract):
    path = tree / "protos" / "outrider" / "v1" / "router.proto"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contract)


def commit(tree, tag=None):
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "m")
    if tag:
        git(tree, "tag", tag)


def git(tree, *arguments):
    subprocess.run([*GIT, *arguments], cwd=tree, check=True, timeout=30)


@pytest.mark.parametrize(("contract", "is_compatible"), [(CONTRACT, True), (GROWN, True), (BROKEN, False)])
def test_the_tree_is_compared_with_the_last_release(wire_contract, tree, contract, is_compatible):
    write(tree, BROKEN)
    wire_contract.write_copy(tree, "0.9.0")
    write(tree, CONTRACT)
    wire_contract.write_copy(tree, "0.10.0")  # the later one, though "0.10" sorts before "0.9"
    write(tree, contract)
    assert wire_contract.is_compatible(tree) is is_compatible


def test_nothing_released_is_said(wire_contract, tree):
    with pytest.raises(SystemExit, match="protos/released is empty"):
        wire_contract.is_compatible(tree)


def test_a_tag_without_its_copy_and_a_copy_that_is_not_its_tags_are_mistakes(wire_contract, tree):
    wire_contract.write_copy(tree, "1.0.0")
    assert wire_contract.differing_copies(tree) == []  # no tag yet, or a clone without tags
    commit(tree, tag="1.0.0")
    assert wire_contract.differing_copies(tree) == []
    write(tree, GROWN)
    git(tree, "commit", "--quiet", "--all", "--message", "grown")
    git(tree, "tag", "1.1.0")
    (mistake,) = wire_contract.differing_copies(tree)
    assert "1.1.0 is tagged and has no copy" in mistake
    wire_contract.write_copy(tree, "1.1.0")
    assert wire_contract.differing_copies(tree) == []
    (tree / "protos" / "released" / "1.0.0" / wire_contract.PUBLIC).write_text(GROWN)
    (mistake,) = wire_contract.differing_copies(tree)
    assert "1.0.0 is not what the tag 1.0.0 holds" in mistake


def test_a_release_is_never_rewritten(wire_contract, tree):
    wire_contract.write_copy(tree, "1.0.0")
    write(tree, GROWN)
    wire_contract.write_copy(tree, "1.0.0")  # not tagged yet
    commit(tree, tag="1.0.0")
    wire_contract.write_copy(tree, "1.0.0")  # the same again
    write(tree, CONTRACT)
    with pytest.raises(SystemExit, match=r"1\.0\.0 is released"):
        wire_contract.write_copy(tree, "1.0.0")


def test_our_own_contract_keeps_its_releases(wire_contract):
    assert wire_contract.differing_copies(ROOT) == []
    assert wire_contract.is_compatible(ROOT)
