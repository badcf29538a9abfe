"""Every choice of a proposer comes from one list."""

from __future__ import annotations

import argparse

import pytest

from draft_node.config import DraftNodeConfig
from outrider.cli.up import add_cluster_arguments
from outrider.cluster.config import ClusterConfig
from outrider.config.resolve import load_config
from outrider.speculation.proposers.factory import (
    DRAFT_CHOICES,
    LOOKUP_NAMES,
    PROPOSER_NAMES,
    DraftChoice,
    make_proposer,
)


@pytest.mark.parametrize("name", LOOKUP_NAMES)
def test_a_cluster_may_draft_by_each_of_them(name):
    assert ClusterConfig(draft=name).draft_choice == DraftChoice(name)
    assert make_proposer(name).info.name == name


def test_a_model_is_named_behind_the_proposer_that_needs_it():
    assert ClusterConfig(draft="draft_model:a/b:c").draft_choice == DraftChoice("draft_model", "a/b:c")
    for wrong in ("draft_model", "draft_model: ", "ngram:x", "psychic", ""):
        with pytest.raises(ValueError, match=", ".join(DRAFT_CHOICES)):
            ClusterConfig(draft=wrong)


def test_help_and_the_draft_nodes_setting_name_all_of_them():
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    assert all(choice in parser.format_help() for choice in DRAFT_CHOICES)
    for name in PROPOSER_NAMES:
        overrides = [f"draft_node.proposer={name}", "draft_node.model=x"]
        loaded = load_config({"draft_node": DraftNodeConfig}, file=None, environ={}, overrides=overrides)
        assert loaded.sections["draft_node"].proposer == name
