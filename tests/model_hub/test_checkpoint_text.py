"""What the files of a checkpoint say about text, against transformers where that reads them too."""

import json

import pytest

from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import default_sampling


def test_sampling_of_the_generation_config_is_what_it_names_and_the_contract_allows():
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20.0,
        "top_p": 0,
        "min_p": None,
        "repetition_penalty": "1.1",
        "eos_token_id": 2,
    }
    found = default_sampling({"generation_config.json": json.dumps(config).encode()})
    assert found == {"temperature": 0.6, "top_k": 20}
    assert default_sampling({}) == {}
    assert default_sampling({"generation_config.json": b'{"temperature": NaN, "top_k": 1e400}'}) == {}
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON"):
        default_sampling({"generation_config.json": b"{"})
