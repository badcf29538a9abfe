from __future__ import annotations

import pytest

from draft_node.config import DraftNodeConfig
from outrider.config.resolve import load_config
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.speculation.proposers.factory import PROPOSER_NAMES, make_proposer


def load(*overrides: str) -> DraftNodeConfig:
    loaded = load_config({"draft_node": DraftNodeConfig}, file=None, environ={}, overrides=overrides)
    config = loaded.sections["draft_node"]
    assert isinstance(config, DraftNodeConfig)
    return config


def test_an_unknown_proposer_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ConfigError, match=", ".join(PROPOSER_NAMES)):
        load("draft_node.proposer=psychic")
    with pytest.raises(ConfigError, match=", ".join(PROPOSER_NAMES)):
        make_proposer("psychic")


def test_a_draft_model_is_computed_as_the_target_but_up_to_its_own_window_and_in_one_process():
    target = ModelConfig(
        id="large", name="chat", device="cuda", max_model_len=512, tensor_parallel_size=2, pipeline_parallel_size=3
    )
    config = load("draft_node.proposer=draft_model", "draft_node.model=/models/small")
    assert config.draft_model(target) == ModelConfig(id="/models/small", device="cuda", head="")
    with pytest.raises(ConfigError, match=r"draft_model needs draft_node\.model"):
        load("draft_node.proposer=draft_model")
