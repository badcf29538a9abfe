"""Tokens a step with draft trees and with chains of as many rows, by the drafter's acceptance.

    python benchmarks/trees.py [--tokens 800] [--rows 2,4,8]

The target and its drafter are simulated: the drafter's logits are the target's with noise, decisions are greedy, and
every step has a draft. What a row costs is not in it: see `benchmarks/forward.py --trees`.
"""

from __future__ import annotations

import argparse

import numpy as np

from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.engine.simulated_model import SimulatedModel, noise_for
from outrider.speculation.draft_tree import ROOT, DraftTree
from outrider.speculation.path_estimates import NUM_RUNNERS_UP
from outrider.speculation.path_tree import PathTree

VOCAB_SIZE = 64
PROMPT = (1, 2, 3)
ACCEPTANCES = (0.3, 0.5, 0.65, 0.8)


class Drafter:
    """The paths of one text, with runners-up at every token."""

    def __init__(self, acceptance: float, *, num_tokens: int) -> None:
        noise = noise_for(acceptance, temperature=0.0, vocab_size=VOCAB_SIZE)
        self._model = SimulatedModel(VOCAB_SIZE, noise=noise)
        pool = BlockPool(num_blocks=num_tokens, block_size=16, hash_seed=b"")
        self._paths = PathTree(SequenceKV(pool), PROMPT)

    def draft(self, text: list[int], num_rows: int, *, takes_trees: bool) -> DraftTree:
        self._paths.follow(text)
        main = self._paths.main
        while len(main.token_ids) < num_rows:
            end = len(text) + len(main.token_ids)
            main.kv.reserve(end)
            main.kv.advance(end)
            best = np.argsort(-self._model.logits([*text, *main.token_ids]), kind="stable").tolist()
            main.append(best[0], tuple(best[1 : 1 + NUM_RUNNERS_UP]))
        if not takes_trees:
            return DraftTree(len(text), token_ids=tuple(main.token_ids[:num_rows]))
        token_ids, parents = self._paths.with_siblings(main, 0, num_rows)
        return DraftTree(len(text), token_ids=token_ids, parents=parents).cut(num_rows)


def tokens_per_step(acceptance: float, num_rows: int, *, num_tokens: int, takes_trees: bool) -> float:
    target, drafter = SimulatedModel(VOCAB_SIZE), Drafter(acceptance, num_tokens=num_tokens)
    text, num_steps = list(PROMPT), 0
    while len(text) < num_tokens:
        draft = drafter.draft(text, num_rows, takes_trees=takes_trees)
        num_steps += 1
        last: int | None = ROOT
        while last is not None:
            text.append(int(target.logits(text).argmax()))
            last = draft.child(last, text[-1])
    return (len(text) - len(PROMPT)) / num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rows", default="2,4,8")
    arguments = parser.parse_args()
    for acceptance in ACCEPTANCES:
        for num_rows in map(int, arguments.rows.split(",")):
            chain, tree = (
                tokens_per_step(acceptance, num_rows, num_tokens=arguments.tokens, takes_trees=takes_trees)
                for takes_trees in (False, True)
            )
            figures = f"chain {chain:.2f}, tree {tree:.2f} ({tree / chain - 1:+.0%})"
            print(f"acceptance {acceptance} rows {num_rows}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
