"""Golden files: a small head, what it needs of its target, and the logits that its owners' code gives for a text.

Each is a safetensors file with tensors `head/NAME`, `target/NAME` and `expected/NAME`. Its metadata has the config.json
of head and target. The expected tensors are:
- `token_ids` [n + 1 + k]: n + 1 committed tokens, then k drafted ones.
- `taps` [n, num_taps * hidden_size]: those of all committed tokens except the newest.
- `logits` [k + 1, draft_vocab_size]: those after the newest committed token and after each drafted one.
- `confidences` [k + 1], of heads that estimate them: logits of the probabilities that the target accepts the tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.heads.base import HeadRows

FOLDER = Path(__file__).parent / "golden"
EAGLE3 = ["eagle3", "eagle3-residual", "eagle3.1", "eagle3-flat"]
CHAINED = ["dflash2", "dflash2-anchor", "dspark", "dspark-gated", "dspark-rnn"]
PARALLEL = ["peagle", "dflash", "dflash-anchor", *CHAINED]
MLP = [
    *("medusa-own-output", "medusa-targets-output", "medusa-truncated"),
    *("mlp-speculator", "mlp-speculator-tied"),
]
MTP = ["mtp-glm", "mtp-deepseek", "mtp-speculators", "mtp-qwen"]
NAMES = ["eagle", *EAGLE3, *PARALLEL, *MLP, *MTP]


class Golden(NamedTuple):
    head: Path
    target: Path
    token_ids: torch.Tensor
    taps: torch.Tensor
    logits: torch.Tensor
    confidences: torch.Tensor | None = None


def write(name, head, head_config, target, target_config, token_ids, taps, logits, **more):
    """Writes a golden file. `head`, `target`: tensors by name."""
    FOLDER.mkdir(exist_ok=True)
    expected = {"token_ids": token_ids, "taps": taps, "logits": logits, **more}
    parts = {"head": head, "target": target, "expected": expected}
    tensors = {
        f"{part}/{key}": value.detach().contiguous() for part, many in parts.items() for key, value in many.items()
    }
    metadata = {"head": json.dumps(head_config), "target": json.dumps(target_config)}
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata)


def unpack(name, folder: Path) -> Golden:
    """Writes the checkpoints `folder`/head and `folder`/target, and returns them with the expected tensors."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for part in ("head", "target"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(metadata[part])
        own = {key.removeprefix(f"{part}/"): value for key, value in tensors.items() if key.startswith(f"{part}/")}
        save_file(own, folder / part / "model.safetensors")
    expected = [tensors.get(f"expected/{key}") for key in ("token_ids", "taps", "logits", "confidences")]
    return Golden(folder / "head", folder / "target", *expected)


class DenseAttention:
    """Causal attention of one sequence over all rows so far, in float32."""

    def __init__(self, num_together=0):
        """`num_together`: number of rows at the end of a forward that all attend to each other."""
        self.kept = {}
        self.num_together = num_together

    def __call__(self, layer, query, key, value, scaling):
        before = self.kept.get(layer)
        if before is not None:
            key, value = torch.cat([before[0], key]), torch.cat([before[1], value])
        self.kept[layer] = key, value
        if query.shape[2] > key.shape[2]:  # latent attention
            key = torch.cat([value, key], -1)
        group = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1).float() for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scaling
        places = torch.arange(len(key))
        last_seen = places[-len(query) :].clone()
        last_seen[len(query) - self.num_together :] = places[-1]
        scores = scores.masked_fill(places > last_seen[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)


def true_rows(token_ids, features, start, end):
    """Returns the rows at positions [start, end), with the target's features."""
    return HeadRows(
        token_ids=token_ids[start + 1 : end + 1],
        features=features[start:end],
        depths=torch.zeros(end - start, dtype=torch.int64),
        positions=torch.arange(start, end),
    )


def logits_of(head, token_ids, features):
    """Returns logits as in a golden file: one forward computes all rows with features of the target, then each drafted
    token has a forward of its own."""
    num_true, attend = len(features), DenseAttention()
    positions = torch.arange(len(token_ids))
    state = head.forward(true_rows(token_ids, features, 0, num_true), attend)[-1:]
    found = [head.logits(state, torch.zeros(1, dtype=torch.int64))]
    for depth, place in enumerate(range(num_true, len(token_ids) - 1), start=1):
        depths = torch.tensor([depth])
        row = HeadRows(
            token_ids=token_ids[place + 1 : place + 2],
            features=state,
            depths=depths,
            positions=positions[place : place + 1],
        )
        state = head.forward(row, attend)
        found.append(head.logits(state, depths))
    return torch.cat(found)
