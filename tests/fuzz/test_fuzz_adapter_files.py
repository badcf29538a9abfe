"""Any adapter_config.json, and any header of an adapter's weights, is read or refused with a ModelError."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ModelError
from outrider.model_hub.adapter_files import read_adapter
from tests.support.adapters import make_adapter
from tests.support.tiny_model import make_tiny_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STRANGE = [None, True, 0, -1, 2**64, 10**300, float("nan"), 1e308, "", "\ud800", "x\0", [], {}, [1, 2], {"a": None}]
NAMES = [
    "lora_alpha",
    "alpha_pattern",
    "rank_pattern",
    "init_lora_weights",
    "base_model.model.x.lora_A.weight",
    "\ud800",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The directory of an adapter, its configuration, the header of its weights, and their data."""
    folder = tmp_path_factory.mktemp("files")
    directory = make_adapter(folder / "adapter", make_tiny_model(folder / "base"), seed=1, targets=("q_proj",))
    data = (directory / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return directory, json.loads((directory / CONFIG).read_bytes()), json.loads(data[8:start]), data[start:]


def changed(draw, value):
    """Draws a value with a strange one in it."""
    if not isinstance(value, (dict, list)) or not value or draw(st.booleans()):
        return draw(st.sampled_from(STRANGE))
    if isinstance(value, list):
        place = draw(st.integers(0, len(value) - 1))
        return [changed(draw, each) if at == place else each for at, each in enumerate(value)]
    place = draw(st.sampled_from([*value, *NAMES]))
    return {**value, place: changed(draw, value.get(place))}


@given(data=st.data())
def test_strange_files_are_read_or_refused(files, data):
    directory, config, header, tensors = files
    if data.draw(st.booleans()):
        config = changed(data.draw, config)
    else:
        header = changed(data.draw, header)
    texts = [bytearray(json.dumps(each).encode()) for each in (config, header)]
    for text in texts:
        for place, byte in data.draw(st.dictionaries(st.integers(0, 1 << 12), st.integers(0, 255), max_size=2)).items():
            text[place % len(text)] = byte
    (directory / CONFIG).write_bytes(texts[0])
    (directory / WEIGHTS).write_bytes(len(texts[1]).to_bytes(8, "little") + texts[1] + tensors)
    with contextlib.suppress(ModelError):
        assert read_adapter(directory).parts
