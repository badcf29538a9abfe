"""Writes the golden files of EAGLE, EAGLE-3, P-EAGLE and DFlash with their owners' code.

Run `python -m tests.heads.make_golden_eagle`. It needs speculators 0.9.0 (https://pypi.org/project/speculators) and, in
PYTHONPATH, SafeAILab's EAGLE (https://github.com/SafeAILab/EAGLE, commit cb7e0841). The tests need neither. The files
were made with torch 2.13.0 and transformers 5.23.0. Their `taps` are the target's hidden states after 0, 1, … and all
layers, of which the head must choose those that it reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from eagle.model import cnets, cnets1
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.models.utils import resolve_target_layer_ids
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

from tests.heads import golden_files

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_TOKENS, NUM_STEPS = 32, 96, 48, 14, 3
LAST = NUM_TOKENS - 1 - NUM_STEPS  # last row with the target's feature; the text has all tokens drafted after it
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
FLAT = SIZES | {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EAGER = resolve_loss_config("kl_div", "eager")
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
    dflash(target, "dflash", draft=DRAFT_VOCAB)
    dflash(target, "dflash-anchor", draft=VOCAB, sample_from_anchor=True)
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


def dflash(target: LlamaConfig, name: str, *, draft: int, sample_from_anchor: bool = False) -> None:
    """Writes a file of DFlash with one block, whose anchor is the newest token. Embedding and output layer are the
    target's."""
    block = NUM_STEPS + (not sample_from_anchor)
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, own = run_target(target, Path(folder))
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(Qwen3Config, 2, False, None),
        draft_vocab_size=draft,
        block_size=block,
        aux_hidden_state_layer_ids=[1, 3, 6],
        mask_token_id=7,
        sample_from_anchor=sample_from_anchor,
        speculators_config=speculators_config("dflash", NUM_STEPS),
    )
    model = DFlashDraftModel(config)
    randomize(model)
    model.embed_tokens.weight.data.copy_(own["model.embed_tokens.weight"])
    if draft == VOCAB:
        model.lm_head.weight.data.copy_(own["lm_head.weight"])
    anchor = LAST + 1
    padding = 2 * block  # no anchor is among the last block_size tokens
    logits = logits_of(
        model,
        hidden_states=pad(torch.cat([hidden_states[tap] for tap in (1, 3, 6)], -1), padding)[None],
        input_ids=pad(token_ids[:, None], padding)[None, :, 0],
        loss_mask=(torch.arange(NUM_TOKENS + padding) == anchor)[None].long(),
        verifier_last_hidden_states=pad(hidden_states[-1], padding)[None],
        document_ids=torch.zeros(1, NUM_TOKENS + padding, dtype=torch.long),
        max_anchors=1,
        loss_config=EAGER,
    )
    shared = {key: own[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    write_speculator(name, model, target, shared, hidden_states, token_ids, logits[-NUM_STEPS:])


def pad(rows: torch.Tensor, num: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, num))


def logits_of(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    """Returns the logits, [num_rows, draft_vocab_size], of a forward that does not return them."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(**inputs)
    return logits[0]


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


def layer_config(
    kind: type[PretrainedConfig], num_layers: int, attention_bias: bool, rope_parameters: Mapping[str, Any] | None
) -> PretrainedConfig:
    layer = kind(num_hidden_layers=num_layers, attention_bias=attention_bias, rms_norm_eps=1e-5, **SIZES)
    if rope_parameters is not None:
        layer.rope_parameters = dict(rope_parameters)
    layer._attn_implementation = "eager"
    return layer


def speculators_config(algorithm: str, num_tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def run_target(config: LlamaConfig, folder: Path) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
    """Returns hidden states [num_layers + 1, NUM_TOKENS, HIDDEN], their random tokens [NUM_TOKENS], and the target's
    tensors."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    token_ids = torch.randint(0, VOCAB, (NUM_TOKENS,))
    with torch.no_grad():
        states = model(token_ids[None], output_hidden_states=True).hidden_states
    return torch.cat(states), token_ids, model.state_dict()


def randomize(model: torch.nn.Module) -> None:
    """Sets weights that matter and that bfloat16 can hold, and spreads the draft vocabulary over the target's."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            values = 1 + 0.3 * values if parameter.ndim == 1 and "bias" not in name else values
            spread = 1 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_((values * spread).bfloat16())
        if getattr(model, "d2t", None) is not None:
            ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
            model.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
            model.t2d[ids] = True
    model.eval()


def write_speculator(
    name: str,
    model: Any,
    target: LlamaConfig,
    shared: Mapping[str, torch.Tensor],
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Writes a head as its library saves it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        saved = load_file(Path(folder) / "model.safetensors")
    write(name, saved, config, target, shared, hidden_states, token_ids, logits)


def write(
    name: str,
    head: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    target: LlamaConfig,
    shared: Mapping[str, torch.Tensor],
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Writes tensors as bfloat16, which holds all their values."""
    parts = [
        {key: value.bfloat16() if value.is_floating_point() else value for key, value in part.items()}
        for part in (head, shared)
    ]
    taps = hidden_states[:, : LAST + 1].transpose(0, 1).flatten(1)
    golden_files.write(
        name,
        head=parts[0],
        head_config=config,
        target=parts[1],
        target_config=target.to_dict(),
        expected={"token_ids": token_ids, "taps": taps, "logits": logits.detach()},
    )


if __name__ == "__main__":
    main()
