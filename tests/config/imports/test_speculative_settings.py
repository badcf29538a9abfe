"""vLLM's `speculative_config`, as `outrider.LLM` and `outrider up --speculative-config` take it."""

from __future__ import annotations

import pytest

from outrider.cli.config import sections_of
from outrider.config.imports import vllm_settings
from outrider.config.resolve import load_config
from outrider.errors import ConfigError
from outrider.heads.locate import DEFAULT_HEAD


def speculative_settings(config, **context):
    return vllm_settings({"speculative_config": config}, **context)


def sections(config, **context):
    overrides = speculative_settings(config, **context).overrides
    return load_config(sections_of(None), file=None, environ={}, overrides=overrides).sections


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_lookup_drafts_alone(method):
    found = sections({"method": method, "num_speculative_tokens": 3})
    assert found["cluster"].draft_choice.proposer == found["draft_node"].proposer == method
    assert found["decode_node"].local_lookup == method
    assert found["model"].head == ""
    assert found["decode_node"].num_speculative_tokens == 3


def test_a_draft_model_runs_in_draft_nodes():
    found = sections({"method": "draft_model", "model": "small/one", "num_speculative_tokens": 4})
    assert found["cluster"].draft == "draft_model:small/one"
    assert (found["draft_node"].proposer, found["draft_node"].model) == ("draft_model", "small/one")
    assert (found["decode_node"].local_lookup, found["model"].head) == ("none", "")


@pytest.mark.parametrize("method", ["eagle3", "medusa", "EAGLE"])
def test_a_head_drafts_in_decode_nodes(method):
    found = sections({"method": method, "model": str(DEFAULT_HEAD)})
    assert found["cluster"].draft == f"head:{DEFAULT_HEAD}"
    assert found["cluster"].draft_nodes == 0
    assert found["model"].head == str(DEFAULT_HEAD)
    assert found["decode_node"].local_head
    assert found["decode_node"].local_lookup == "none"


def test_an_mtp_head_comes_with_the_served_model(tmp_path):
    found = sections({"method": "mtp"}, target=str(tmp_path))
    assert found["model"].head == found["draft_node"].model == str(tmp_path)


def test_none_is_no_speculation():
    found = sections(None)
    assert (found["cluster"].draft, found["decode_node"].num_speculative_tokens) == ("none", 0)


def test_what_concerns_speed_only_is_a_warning():
    imported = speculative_settings({"method": "ngram", "prompt_lookup_max": 4, "draft_tensor_parallel_size": 1})
    assert imported.warnings == [
        "argument speculative_config.prompt_lookup_max: n-grams are of 2 to 4 tokens, the longest match first"
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 3}, "method is missing: name one of ngram"),
        ({"method": "lookahead"}, "lookahead is none of"),
        ({"method": "eagl3"}, "the nearest is eagle3"),
        ({"method": "eagle3"}, "eagle3 needs model, the folder of a head"),
        ({"method": "mtp"}, "mtp needs model"),
        ({"method": "mtp", "model": None}, "mtp needs model"),
        ({"method": "eagle3", "model": "some/where-on-a-hub"}, "is not a folder: download the head"),
        ({"method": "draft_model"}, "draft_model needs model, a model"),
        ({"method": "ngram", "num_speculativ_tokens": 3}, "the nearest is speculative_config.num_speculative_tokens"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "verification_method"),
        ("ngram", "it is a group of keys"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_names_the_key(config, message):
    with pytest.raises(ConfigError) as raised:
        speculative_settings(config)
    assert str(raised.value).startswith("argument speculative_config")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
