from __future__ import annotations

import pytest

from draft_node.config import DraftNodeConfig
from outrider.config import load_config
from outrider.errors import ConfigError
from outrider.speculation.proposers.factory import ProposerSettings, make_proposer


def load(*overrides: str) -> DraftNodeConfig:
    config = load_config({"draft_node": DraftNodeConfig}, file=None, environ={}, overrides=overrides)["draft_node"]
    assert isinstance(config, DraftNodeConfig)
    return config


def test_prompt_lookup_is_the_default():
    assert make_proposer(load().proposer, load()).name == "ngram"


def test_an_unknown_proposer_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ConfigError, match="ngram, suffix, draft_model"):
        load("draft_node.proposer=psychic")
    with pytest.raises(ConfigError, match="ngram, suffix, draft_model"):
        make_proposer("psychic")


def test_ngram_sizes_must_be_in_order():
    with pytest.raises(ConfigError, match="min_ngram 5 is above max_ngram 4"):
        load("draft_node.min_ngram=5", "draft_node.max_ngram=4")
    with pytest.raises(ValueError, match="min_ngram 5 is above max_ngram 4"):
        ProposerSettings(max_ngram=4, min_ngram=5)


def test_the_draft_model_is_set_in_the_section_of_the_draft_node():
    assert load("draft_node.model.id=/models/small").model.id == "/models/small"
