"""Writes the golden files of DFlash, DFlash 2 and DSpark with their owners' code.

Run `python -m tests.heads.make_golden_blocks`. It needs speculators 0.9.0 (https://pypi.org/project/speculators). The
tests do not. In the files of DFlash 2 and DSpark, the drafted tokens are the head's own greedy choices.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from transformers import LlamaConfig, Qwen3Config

from tests.heads.golden_speculators import (
    DRAFT_VOCAB,
    EAGER,
    LAST,
    NUM_STEPS,
    NUM_TOKENS,
    SIZES,
    VOCAB,
    layer_config,
    pad,
    randomize,
    run_target,
    speculators_config,
    write_speculator,
)

ANCHOR = LAST + 1
KINDS: dict[str, tuple[Any, Any]] = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}


def main() -> None:
    rank, selector = {"markov_rank": 8}, {"selector_rank": 8, "selector_top_k": 5}
    convolution = {"conv_kernel_size": 3, "conv_group_size": 8}
    head("dflash", "dflash", draft=DRAFT_VOCAB)
    head("dflash-anchor", "dflash", draft=VOCAB, sample_from_anchor=True)
    head("dflash2", "dflash2", draft=VOCAB, **selector)
    head(
        "dflash2-anchor",
        "dflash2",
        draft=VOCAB,
        selector_rank=8,
        selector_top_k=5,
        sample_from_anchor=True,
        **convolution,
    )
    head("dspark", "dspark", draft=DRAFT_VOCAB, **rank)
    head("dspark-gated", "dspark", draft=VOCAB, markov_head_type="gated", sample_from_anchor=False, **rank)
    head("dspark-rnn", "dspark", draft=DRAFT_VOCAB, markov_head_type="rnn", confidence_head_with_markov=False, **rank)


def head(name: str, kind: str, *, draft: int, **options: Any) -> None:
    """Writes a file of a head with one block, whose anchor is the newest token. Embedding and output layer are the
    target's."""
    target, (model_class, config_class) = LlamaConfig(num_hidden_layers=8, **SIZES), KINDS[kind]
    drafts_from_anchor = options.get("sample_from_anchor", kind == "dspark")
    block = NUM_STEPS + (not drafts_from_anchor)
    with tempfile.TemporaryDirectory() as folder:
        hidden_states, token_ids, own = run_target(target, Path(folder))
    config = config_class(
        transformer_layer_config=layer_config(Qwen3Config, 2, False, None),
        draft_vocab_size=draft,
        block_size=block,
        aux_hidden_state_layer_ids=[1, 3, 6],
        mask_token_id=7,
        speculators_config=speculators_config(kind, NUM_STEPS),
        **options,
    )
    model = model_class(config)
    randomize(model)
    model.embed_tokens.weight.data.copy_(own["model.embed_tokens.weight"])
    if draft == VOCAB:
        model.lm_head.weight.data.copy_(own["lm_head.weight"])
    taps = torch.cat([hidden_states[tap] for tap in (1, 3, 6)], -1)
    for step in range(NUM_STEPS):
        logits, confidences = block_logits(model, kind, taps, hidden_states[-1], token_ids)
        place = ANCHOR + 1 + step
        if kind != "dflash" and place < NUM_TOKENS:
            best = logits[step].argmax()
            token_ids[place] = best + (0 if model.d2t is None else model.d2t[best])
    shared = {key: own[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    write_speculator(name, model, target, shared, hidden_states, token_ids, logits, confidences)


def block_logits(
    model: Any, kind: str, taps: torch.Tensor, last: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns logits [NUM_STEPS, draft_vocab_size] of the drafted tokens, given the tokens before each in the text, and
    the logits of their confidences."""
    seen: dict[str, torch.Tensor] = {}
    padding = 2 * model.block_size  # no anchor is among the last block_size tokens
    note = dspark_core.compute_metrics

    def noting(
        logits: torch.Tensor, targets: torch.Tensor, confidences: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        seen.update(logits=logits, confidences=confidences)
        return note(logits, targets, confidences, *rest, **options)

    def note_output(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        seen["logits"] = output

    def note_state(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        seen["states"] = output

    hooks = [model.lm_head.register_forward_hook(note_output), model.norm.register_forward_hook(note_state)]
    dspark_core.compute_metrics = noting
    with torch.no_grad():
        model(
            hidden_states=pad(taps, padding)[None],
            input_ids=pad(token_ids[:, None], padding)[None, :, 0],
            loss_mask=(torch.arange(NUM_TOKENS + padding) == ANCHOR)[None].long(),
            verifier_last_hidden_states=pad(last, padding)[None],
            document_ids=torch.zeros(1, NUM_TOKENS + padding, dtype=torch.long),
            max_anchors=1,
            loss_config=EAGER,
            **({} if kind == "dflash" else {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}),
        )
        if kind == "dflash2":
            previous = token_ids[None, ANCHOR : ANCHOR + NUM_STEPS]
            logits, states = (seen[name][:, -NUM_STEPS:] for name in ("logits", "states"))
            ids, scores = model.candidate_selector.select(logits, states, previous)
            seen["logits"] = torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
    dspark_core.compute_metrics = note
    for hook in hooks:
        hook.remove()
    confidences = seen.get("confidences")
    return seen["logits"][0, -NUM_STEPS:], None if confidences is None else confidences[0, -NUM_STEPS:]


if __name__ == "__main__":
    main()
