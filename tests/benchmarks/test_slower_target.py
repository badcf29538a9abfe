"""The target whose added layers add nothing."""

import torch
from transformers import AutoModelForCausalLM

from benchmarks.three_lines.slower_target import write_slower_target
from tests.support.tiny_model import make_tiny_model


def test_added_layers_leave_the_logits_as_they_are_to_the_bit(tmp_path):
    write_slower_target(make_tiny_model(tmp_path / "tiny"), tmp_path / "slower", num_added_layers=3)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("tiny", "slower")]
    tiny, slower = (len(model.model.layers) for model in models)
    assert slower == tiny + 3
    assert models[1].model.layers[-1].mlp.up_proj.weight.any()
    token_ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.inference_mode():
        logits = [model(token_ids).logits for model in models]
    assert torch.equal(*logits)
