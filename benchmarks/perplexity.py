"""Measures the cost of rounding: perplexity, and how often the likeliest token differs from the first variant's.

    .venv/bin/python benchmarks/perplexity.py [--model ID] [--variants float32,native,int8] [--tokens 6144] [FILE ...]

Each text is cut into pieces of 512 tokens, which the model reads independently. By default the texts are this
repository's: prose, a license and source code. KL is the mean divergence from the first variant's probabilities.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from forward import BLOCK_SIZE, VARIANTS
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.attention import make_attention_backend
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.model_runner import make_runner
from outrider.model_hub.config import DEFAULT_MODEL_ID, ModelConfig
from outrider.model_hub.load import load_model
from outrider.model_hub.locate import locate_model

PIECE = 512
ROOT = Path(__file__).resolve().parents[1]
TEXTS = (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "LICENSE", ROOT / "outrider" / "errors.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_ID, help="a model.id; default %(default)s")
    parser.add_argument("--variants", default="float32,native,int8", help="of " + ", ".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=6144, help="at most, an equal part of each text")
    parser.add_argument("texts", nargs="*", type=Path, default=TEXTS)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(locate_model(ModelConfig(id=arguments.model)).directory / "tokenizer.json"))
    of_each = arguments.tokens // len(arguments.texts)
    pieces = [
        ids[start : start + PIECE]
        for ids in (tokenizer.encode(path.read_text(encoding="utf-8")).ids[:of_each] for path in arguments.texts)
        for start in range(0, len(ids), PIECE)
    ]
    pieces = [ids for ids in pieces if len(ids) > 1]
    expected: list[Tensor] = []  # the first variant's
    for name in arguments.variants.split(","):
        loss, divergence, num_same, num_tokens = 0.0, 0.0, 0, 0
        for index, (ids, logits) in enumerate(zip(pieces, forwards(arguments.model, name, pieces), strict=True)):
            log_probs = logits.log_softmax(dim=1)[:-1]
            if len(expected) <= index:
                expected.append(log_probs)
            first = expected[index]
            loss -= float(log_probs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())
            divergence += float((first.exp() * (first - log_probs)).sum())
            num_same += int((first.argmax(dim=1) == log_probs.argmax(dim=1)).sum())
            num_tokens += len(ids) - 1
        perplexity = torch.tensor(loss / num_tokens).exp()
        print(
            f"{name:10} perplexity {perplexity:.3f}, same likeliest token {num_same / num_tokens:.2%}, "
            f"KL {divergence / num_tokens:.5f} ({num_tokens} tokens)",
            flush=True,
        )


def forwards(model: str, variant: str, pieces: Sequence[list[int]]) -> Iterator[Tensor]:
    """Yields the logits [num_tokens, vocab_size] of each piece."""
    loaded = load_model(ModelConfig(id=model, **VARIANTS[variant]))
    blocks = range(PIECE // BLOCK_SIZE)
    cache = PagedKVCache(loaded.spec.planes, num_blocks=len(blocks), block_size=BLOCK_SIZE, kernels=loaded.cpu_kernels)
    runner = make_runner(loaded, cache, make_attention_backend())
    for ids in pieces:
        batch = build_input_batch([SequenceRows(ids, 0, list(blocks), len(ids))], BLOCK_SIZE)
        yield torch.as_tensor(runner.forward(batch))


if __name__ == "__main__":
    main()
