"""`python -m tests.model_hub.make_default_logits`: records logits of the default model, computed by transformers.

These are the largest logits of each row, in float32. `outrider.model_hub.default_packing` compares its own with them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.model_hub.config import ModelConfig
from outrider.model_hub.default_packing import RECORDED_LOGITS
from outrider.model_hub.locate import locate_model

NUM_TOKENS, NUM_IDS = 40, 8


def default_logits() -> dict[str, Any]:
    """Returns 40 token ids, and the ids and values of each row's largest logits: each [40, 8]."""
    directory = locate_model(ModelConfig()).directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    token_ids = np.random.default_rng(1).integers(0, model.config.vocab_size, NUM_TOKENS)
    with torch.inference_mode():
        values, ids = model(torch.from_numpy(token_ids)[None]).logits[0].topk(NUM_IDS)
    logits = np.round(values.double().numpy(), 3)
    return {"token_ids": token_ids.tolist(), "ids": ids.tolist(), "logits": logits.tolist()}


if __name__ == "__main__":
    RECORDED_LOGITS.write_text(json.dumps(default_logits()) + "\n", encoding="utf-8")
