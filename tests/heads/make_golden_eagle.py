"""Writes the golden files of EAGLE, EAGLE-3 and P-EAGLE with their owners' code.

Run `python -m tests.heads.make_golden_eagle`. It needs speculators 0.9.0 (https://pypi.org/project/speculators) and, in
PYTHONPATH, SafeAILab's EAGLE (https://github.com/SafeAILab/EAGLE, commit cb7e0841). The tests need neither.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from eagle.model import cnets, cnets1
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.models.utils import resolve_target_layer_ids
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.heads.golden_speculators import (
    DRAFT_VOCAB,
    EAGER,
    LAST,
    NUM_STEPS,
    NUM_TOKENS,
    SIZES,
    VOCAB,
    layer_config,
    logits_of,
    randomize,
    run_target,
    speculators_config,
    write,
    write_speculator,
)

FLAT = SIZES | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
UNSAID = {"rope_scaling": None, "pretraining_tp": 1}  # SafeAILab's defaults
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def main() -> None:
    target = LlamaConfig(num_hidden_layers=8, **SIZES)
    eagle3(target, "eagle3", LlamaConfig, 1, rope_parameters=LLAMA3)
    eagle3(target, "eagle3-residual", Qwen3Config, 2, norm_before_residual=True, norm_before_fc=True, ids=[1, 4, 6])
    eagle3(target, "eagle3.1", LlamaConfig, 1, fc_norm=True, norm_output=True, attention_bias=True, draft=VOCAB)
    peagle(target)
    flat_eagle3(target)
    eagle(target)


def eagle3(  # one file
    target: LlamaConfig,
    name: str,
    kind: type[PretrainedConfig],
    num_layers: int,
    *,
    ids: list[int] | None = None,
    draft: int = DRAFT_VOCAB,
    rope_parameters: Mapping[str, Any] | None = None,
    attention_bias: bool = False,
    **flags: bool,
) -> None:
    layer = layer_config(kind, num_layers, attention_bias, rope_parameters)
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, _ = run_target(target, Path(folder))
        taps = resolve_target_layer_ids(ids, folder)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft,
        eagle_aux_hidden_state_layer_ids=ids,
        speculators_config=speculators_config("eagle3", 3),
        **flags,
    )
    model = Eagle3DraftModel(config)
    randomize(model)
    logits = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            hidden_states=torch.cat([hidden_states[tap, :-1] for tap in taps], -1)[None],
            input_ids=token_ids[None, 1:],
            document_ids=torch.zeros(1, NUM_TOKENS - 1, dtype=torch.long),
            ttt_steps=NUM_STEPS,
        )
    write_speculator(name, model, target, {}, hidden_states, token_ids, torch.stack(logits)[:, LAST])


def peagle(target: LlamaConfig) -> None:
    """Writes P-EAGLE's file. In training, mask rows follow random rows; here, they follow row LAST only."""
    masks = range(1, NUM_STEPS)
    anchors, depths = [*range(NUM_TOKENS - 1), *(LAST for _ in masks)], [*[0] * (NUM_TOKENS - 1), *masks]
    peagle_core.generate_cod_sample_indices = lambda **_: (torch.tensor(anchors), torch.tensor(depths))
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, _ = run_target(target, Path(folder))
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_config(LlamaConfig, 2, False, None),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        norm_before_residual=True,
        mask_token_id=7,
        speculators_config=speculators_config("peagle", NUM_STEPS),
    )
    model = PEagleDraftModel(config)
    randomize(model)
    taps = torch.cat([hidden_states[tap, :-1] for tap in (2, 4, 5)], -1)
    logits = logits_of(
        model,
        hidden_states=taps[None],
        input_ids=token_ids[None, 1:],
        document_ids=torch.zeros(1, NUM_TOKENS - 1, dtype=torch.long),
        verifier_last_hidden_states=hidden_states[None, -1, 1:],
        loss_config=EAGER,
    )
    decided = [LAST, *range(NUM_TOKENS - 1, NUM_TOKENS - 2 + NUM_STEPS)]
    write_speculator("peagle", model, target, {}, hidden_states, token_ids, logits[decided])


def flat_eagle3(target: LlamaConfig) -> None:
    """Writes the file of SafeAILab's EAGLE-3, with the target's embedding and an output layer of its own."""
    model = cnets.Model(SimpleNamespace(**FLAT, **UNSAID, draft_vocab_size=DRAFT_VOCAB), bias=False)
    randomize(model)
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, _ = run_target(target, Path(folder))
    taps = torch.cat([hidden_states[tap] for tap in (2, 4, 5)], -1)
    logits = model.lm_head(model.norm(drafts(model, taps, token_ids)))
    head = {name: value for name, value in model.state_dict().items() if name != "embed_tokens.weight"}
    config = FLAT | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    shared = {"model.embed_tokens.weight": model.embed_tokens.weight}
    write("eagle3-flat", head, config, target, shared, hidden_states, token_ids, logits)


def eagle(target: LlamaConfig) -> None:
    """Writes EAGLE's file, with an embedding of its own and the target's output layer."""
    model = cnets1.Model(SimpleNamespace(**FLAT | {"num_hidden_layers": 2}, **UNSAID), bias=True)
    randomize(model)
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, own = run_target(target, Path(folder))
    logits = torch.nn.functional.linear(drafts(model, hidden_states[-1], token_ids), own["lm_head.weight"])
    config = FLAT | {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"], "bias": True}
    shared = {"lm_head.weight": own["lm_head.weight"]}
    write("eagle", model.state_dict(), config, target, shared, hidden_states, token_ids, logits)


def drafts(model: torch.nn.Module, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states [NUM_STEPS, HIDDEN] after row LAST and after rows that are fed the state before."""
    found = []
    with torch.no_grad():
        hidden, cache = model(features[None, : LAST + 1], token_ids[None, 1 : LAST + 2], use_cache=True)
        for step in range(NUM_STEPS):
            found.append(hidden[0, -1])
            token = token_ids[None, LAST + 2 + step : LAST + 3 + step]
            if step < NUM_STEPS - 1:
                hidden, cache = model(hidden[:, -1:], token, past_key_values=cache, use_cache=True)
    return torch.stack(found)


if __name__ == "__main__":
    main()
