"""Opens, feeds and changes the heads of golden files."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from outrider.heads.base import HeadRows
from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
from tests.heads import golden_files

CPU = torch.device("cpu")
TOLERANCE = 1e-3


def opened(golden):
    return open_head(golden.head, Target.open(golden.target), CPU, torch.float32)


def taps_of(golden, head):
    """Returns the states that the head reads: [n, num_taps * hidden_size]. A file has only these, or all layers'."""
    layers = golden.taps.unflatten(1, (-1, head.reduction.hidden_size))
    num_taps = len(head.reduction.taps)
    return (layers if layers.shape[1] == num_taps else layers[:, head.reduction.taps]).flatten(1)


def logits_of(golden):
    """Returns the head's logits, which should equal the file's `logits`."""
    return _outputs_of(golden)[0]


def confidences_of(golden):
    """Returns the logits of confidences, which should equal the file's `confidences`."""
    return _outputs_of(golden)[1]


@torch.inference_mode()
def _outputs_of(golden):
    head = opened(golden)
    features = head.reduction.to(CPU, torch.float32)(taps_of(golden, head))
    if head.spec.num_parallel == 1:
        return golden_files.logits_of(head, golden.token_ids, features), None
    num_known = len(features) + 1
    return _block_outputs(head, golden.token_ids[:num_known], features, golden.token_ids[num_known:])


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_layer(folder, **changes):
    """Changes fields that describe the decoder layer, in any layout."""
    config = json.loads((folder / "config.json").read_text())
    nested = next((name for name in ("transformer_layer_config", "text_config") if config.get(name)), None)
    rewrite_config(folder, **(changes if nested is None else {nested: config[nested] | changes}))


def rewrite_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def assert_logits(found, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def block_logits(head, token_ids, features, drafted=None, assumed=()):
    """Returns the logits of a block of parallel rows, which follow rows with the target's features.

    `drafted`: the tokens before each of the block's but the first; None: the likeliest ones. `assumed`: tokens after
    the newest, which the block follows.
    """
    return _block_outputs(head, token_ids, features, drafted, assumed)[0]


def _block_outputs(head, token_ids, features, drafted, assumed=()):
    """Returns `block_logits`, and the logits of the confidences [num_parallel] if the head has them."""
    hidden, depths = _block_states(head, token_ids, features, assumed)
    num = head.spec.num_parallel
    logits = head.logits(hidden, depths)
    if not head.spec.is_chained:
        return logits, None
    previous, parts = torch.tensor([[*token_ids[: len(features) + 1].tolist(), *assumed][-1:]]).reshape(1, 1), []
    for place in range(num):
        parts.append(head.logits_after(logits[place : place + 1], hidden[None, : place + 1], previous))
        best = parts[-1][0].argmax(-1) if drafted is None else drafted[place : place + 1]
        known = drafted is not None or head.target_ids is None
        previous = torch.cat([previous, (best if known else head.target_ids[best])[None]], -1)
    confidences = [each for _, each in parts if each is not None]
    return torch.cat([each for each, _ in parts]), torch.cat(confidences) if confidences else None


def _block_states(head, token_ids, features, assumed):
    """Returns hidden states and depths of the rows that draft. `assumed` is at most as long as a block."""
    num_true, num = len(features), head.spec.num_parallel
    tokens, states = head.spec.parallel_tokens(int(token_ids[num_true]), *assumed), head.parallel_feature[None, :][:0]
    if assumed and not head.spec.attends_both_ways:
        tokens, states = (*assumed, *tokens), _block_states(head, token_ids, features, ())[0][: len(assumed)]
    attend = golden_files.DenseAttention()
    true = golden_files.true_rows(token_ids, features, 0, num_true)
    rows = HeadRows(
        token_ids=torch.cat([true.token_ids, torch.tensor(tokens)]),
        features=torch.cat([true.features, states, head.parallel_feature.expand(len(tokens) - len(states), -1)]),
        depths=torch.cat([true.depths, 1 + torch.arange(len(tokens))]),
        positions=torch.arange(num_true + len(tokens)),
    )
    attend.num_together = len(tokens) if head.spec.attends_both_ways else 0
    return head.forward(rows, attend)[-num:], rows.depths[-num:]
