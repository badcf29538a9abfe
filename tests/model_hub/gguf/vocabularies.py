"""Small vocabularies in GGUF's form, whose tokens cross the words of the hard texts wherever nothing separates them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

PRES = (
    *("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3"),
    "deepseek-coder",
)
"""Values of `tokenizer.ggml.pre`, one for each kind."""
_NUM_MERGES = 1200
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def vocabularies(texts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, metadata without the prefix "tokenizer.ggml.")."""
    spelling = _byte_spelling()
    spelled = ["".join(spelling[byte] for byte in text.encode()) for text in texts]
    merges = _merges(spelled)
    words = [word for text in spelled for word in text.replace("Ġ", " Ġ").split()]  # some are no result of merges
    tokens = list(dict.fromkeys([*_SPECIAL, *spelling.values(), *map("".join, merges), *words]))
    for pre in PRES:
        yield (
            pre,
            {
                "model": "gpt2",
                "pre": pre,
                "tokens": tokens,
                "token_type": [3 if token in _SPECIAL else 1 for token in tokens],
                "merges": [" ".join(merge) for merge in merges],
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        )
    escaped = [text.replace(" ", "▁") for text in texts]
    merges = [merge for merge in _merges(escaped) if "".join(merge).isprintable() and max(merge) < "\u3000"]
    pieces = list(dict.fromkeys([*map("".join, merges), *sorted({part for merge in merges for part in merge})]))
    starts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "    ", "<|im_start|>"]
    pieces = [piece for piece in pieces if piece not in starts]
    sentence_piece = {
        "model": "llama",
        "tokens": [*starts, *pieces],
        "token_type": [2, 3, 3, *(6 for _ in range(256)), 4, 3, *(1 for _ in pieces)],
        "scores": [*(0.0 for _ in starts), *(-float(index) for index in range(len(pieces)))],
    }
    yield "sentencepiece", sentence_piece
    without = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    yield "sentencepiece without prefix", sentence_piece | without


def _merges(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Trains BPE on whole texts."""
    sequences = [list(text) for text in texts]
    found = []
    for _ in range(_NUM_MERGES):
        pairs = Counter(pair for symbols in sequences for pair in pairwise(symbols))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(best)
        for symbols in sequences:
            at = 0
            while at < len(symbols) - 1:
                if (symbols[at], symbols[at + 1]) == best:
                    symbols[at : at + 2] = ["".join(best)]
                at += 1
    return found


def _byte_spelling() -> dict[int, str]:
    """Returns the characters that stand for bytes in GPT-2's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
