"""Heads of golden files whose `taps` are all hidden states of a target of `NUM_LAYERS` layers."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
from tests.heads import golden_files

CPU = torch.device("cpu")
NUM_LAYERS = 8


def opened(golden):
    return open_head(golden.head, Target.open(golden.target), CPU, torch.float32)


def logits_of(golden):
    """The taps of these files are all layers' hidden states: the head's own are chosen here."""
    head = opened(golden)
    layers = golden.taps.view(len(golden.taps), NUM_LAYERS + 1, -1)
    return golden_files.logits_of(head, golden.token_ids, layers[:, head.reduction.taps].flatten(1))


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def assert_logits(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
