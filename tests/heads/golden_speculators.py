"""What the scripts that write golden files of speculators' heads share: the target, random weights, and the writing.

The files were made with torch 2.13.0 and transformers 5.23.0. Their `taps` are the target's hidden states after 0, 1, …
and all layers, of which the head must choose those that it reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

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
EAGER = resolve_loss_config("kl_div", "eager")


def pad(rows: torch.Tensor, num: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, num))


def logits_of(model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
    """Returns the logits, [num_rows, draft_vocab_size], of a forward that does not return them."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(**inputs)
    return logits[0]


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
    confidences: torch.Tensor | None = None,
) -> None:
    """Writes a head as its library saves it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        saved = load_file(Path(folder) / "model.safetensors")
    write(name, saved, config, target, shared, hidden_states, token_ids, logits, confidences)


def write(
    name: str,
    head: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    target: LlamaConfig,
    shared: Mapping[str, torch.Tensor],
    hidden_states: torch.Tensor,
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    confidences: torch.Tensor | None = None,
) -> None:
    """Writes tensors as bfloat16, which holds all their values."""
    parts = [
        {key: value.bfloat16() if value.is_floating_point() else value for key, value in part.items()}
        for part in (head, shared)
    ]
    taps = hidden_states[:, : LAST + 1].transpose(0, 1).flatten(1)
    more = {} if confidences is None else {"confidences": confidences}
    golden_files.write(
        name, parts[0], config, parts[1], target.to_dict(), token_ids, taps, logits=logits.detach(), **more
    )
