"""Which nodes get a drafter head by `--head` and by `--draft head:DIR`."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from decode_node.config import DecodeNodeConfig
from draft_node.config import DraftNodeConfig
from outrider.cli.up import add_cluster_arguments, make_cluster
from outrider.cluster.cluster import Cluster
from outrider.cluster.config import ClusterConfig
from outrider.cluster.plan import Launch, child_command, plan_children
from outrider.config.arguments import parse_role_arguments
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig

SECTIONS = {"model": ModelConfig, "decode_node": DecodeNodeConfig, "draft_node": DraftNodeConfig}
PORTS = {"port": 0, "metrics_port": 0}


def sections_of(config: ClusterConfig, *overrides: str) -> dict:
    """Returns, by process name, the sections that the process reads from its command line."""
    launch = Launch(overrides=overrides, environ={})
    found = {}
    for spec in plan_children(config, launch):
        command = child_command(spec, config, launch, targets={}, ports=PORTS, turns_file=Path("/run/turns"))
        arguments = [
            part
            for flag, setting in itertools.pairwise(command)
            if flag in ("--default", "--set") and setting.partition(".")[0] in SECTIONS
            for part in (flag, setting)
        ]
        found[spec.name] = parse_role_arguments(spec.role, SECTIONS, arguments)
    return found


def cluster_of(*arguments: str) -> Cluster:
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    return make_cluster(parser.parse_args([*arguments, "--port", "0"]))


def test_a_head_that_draft_nodes_propose_with_is_known_to_targets_which_do_not():
    found = sections_of(ClusterConfig(draft="head:heads/parrot"))
    folder = str(Path("heads/parrot").absolute())
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == folder
    assert found["decode-0"]["decode_node"].local_head is False
    draft = found["draft-0"]["draft_node"]
    assert (draft.proposer, draft.model) == ("head", folder)
    assert draft.draft_model(ModelConfig(id="target")) == ModelConfig(id="target", head=folder)


def test_the_default_models_own_head_is_left_out_where_nothing_drafts():
    for draft, head in (("ngram", "auto"), ("none", "")):
        found = sections_of(cluster_of("--draft", draft).config)
        assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == head
        assert found["decode-0"]["decode_node"].local_head is True


def test_draft_nodes_may_propose_with_the_default_models_own_head():
    found = sections_of(cluster_of("--draft", "head:auto").config)
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == "auto"
    assert found["decode-0"]["decode_node"].local_head is False
    assert (found["draft-0"]["draft_node"].proposer, found["draft-0"]["draft_node"].model) == ("head", "auto")


def test_a_head_of_decode_nodes_proposes_there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parrot").mkdir()
    cluster = cluster_of("--head", "parrot")
    found = sections_of(cluster.config, *cluster.launch.overrides)
    assert found["prefill-0"]["model"].head == found["decode-0"]["model"].head == str(tmp_path / "parrot")
    assert found["decode-0"]["decode_node"].local_head is True
    assert found["draft-0"]["draft_node"].proposer == "ngram"


def test_a_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "parrot").mkdir()
    folder = str(tmp_path / "parrot")
    for arguments in (("--head", "~/parrot"), ("--draft", "head:~/parrot")):
        cluster = cluster_of(*arguments)
        found = sections_of(cluster.config, *cluster.launch.overrides)
        assert found["decode-0"]["model"].head == folder
    assert found["draft-0"]["draft_node"].model == folder


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--head", "{0}", "--draft", "none"), "--draft none"),
        (("--head", "{0}", "--draft", "head:{0}"), "--draft head"),
        (("--head", "{0}/nowhere"), "nowhere is not a folder"),
        (("--draft", "head:{0}/nowhere"), "nowhere is not a folder"),
    ],
)
def test_what_contradicts_or_is_not_there_is_refused_before_anything_starts(tmp_path, arguments, named):
    with pytest.raises(ConfigError, match=named):
        cluster_of(*(argument.format(tmp_path) for argument in arguments))


def test_a_draft_model_beside_a_head_is_without_it():
    config = DraftNodeConfig(proposer="draft_model", model="small")
    assert config.draft_model(ModelConfig(id="target", head="parrot")).head == ""


def test_a_head_needs_a_folder():
    with pytest.raises(ValueError, match="needs draft_node"):
        DraftNodeConfig(proposer="head")
