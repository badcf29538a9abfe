"""The data set of a run: the chosen answers, and the target's hidden states at each of their tokens.

It is kept in two files in the run's working folder. texts.json holds the chosen answers and is written once. hidden.bin
grows text by text. The size of hidden.bin tells how many texts it has, so that a killed run can continue.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.errors import ConfigError
from outrider.node import DTYPE_BYTES
from outrider.training.answer_files import KeptAnswer
from outrider.training.plan import SEED, TrainingPlan, write_atomically

HELD_OUT_SHARE = 0.05  # fraction of prompts whose answers are held out
MIN_PROMPT_TOKENS = 2  # the chain that drafts an answer's first token needs a feature and the token after it


def choose_texts(
    plan: TrainingPlan, answers: Iterable[KeptAnswer], *, vocab_size: int, hidden_size: int, num_taps: int, dtype: str
) -> Dataset:
    """Writes texts.json. Leaves out texts that are too long, and the oldest ones beyond `plan.max_feature_bytes`.

    `num_taps`: the number of taps of the residual stream, not counting the final hidden state. Raises: ConfigError if
    too few texts remain, or if another model wrote an answer.
    """
    width = (num_taps + 1) * hidden_size
    room = plan.max_feature_bytes // (width * DTYPE_BYTES[dtype])  # tokens
    fitting: deque[KeptAnswer] = deque()
    for answer in answers:
        if any(not 0 <= token_id < vocab_size for token_id in answer.token_ids):
            raise ConfigError(f"an answer has token ids outside 0 to {vocab_size - 1}: the target did not write it")
        length = len(answer.token_ids)
        if len(answer.prompt) < MIN_PROMPT_TOKENS or len(answer.response) < 2 or length > plan.max_length:
            continue
        fitting.append(answer)
        room -= length
        while room < 0:
            room += len(fitting.popleft().token_ids)
    chosen = held_out_prompts(fitting, HELD_OUT_SHARE)
    held_out = [answer for answer in fitting if tuple(answer.prompt) in chosen]
    others = [answer for answer in fitting if tuple(answer.prompt) not in chosen]
    if not held_out or not others:
        raise ConfigError(
            f"{len(fitting)} answers of 2 to {plan.max_length} tokens are too few for training and evaluation: "
            f"give more --minutes or more prompts"
        )
    random.Random(SEED).shuffle(others)  # noqa: S311 no secret
    folder = features_folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [asdict(text) for text in (*held_out, *others)]
    facts = {"num_held_out": len(held_out), "hidden_size": hidden_size, "width": width, "dtype": dtype, "texts": texts}
    write_atomically(folder / "texts.json", json.dumps(facts))
    return Dataset(folder)


def held_out_prompts(answers: Iterable[KeptAnswer], share: float) -> set[tuple[int, ...]]:
    """Returns the prompts whose answers are held out: the fraction `share` of the prompts of each kind.

    At least one prompt is held out of each kind that has two or more. All answers to such a prompt are held out,
    because training on one of them would reveal the others.
    """
    by_kind: dict[str, set[tuple[int, ...]]] = {}
    for answer in answers:
        by_kind.setdefault(answer.kind, set()).add(tuple(answer.prompt))
    chosen: set[tuple[int, ...]] = set()
    for prompts in by_kind.values():
        if len(prompts) > 1:
            order = sorted(prompts, key=lambda prompt: hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest())
            chosen.update(order[: max(1, round(share * len(order)))])
    return chosen


def features_folder(plan: TrainingPlan) -> Path:
    return plan.work / "features"


class Dataset:
    """The chosen texts (prompts with their answers) and their hidden states, which are memory-mapped from a file.

    Held-out texts come first; the others follow in random order.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: FileNotFoundError if no texts have been chosen."""
        facts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        self.texts = [KeptAnswer(**fields) for fields in facts["texts"]]
        self.hidden_size: int = facts["hidden_size"]
        self.width: int = facts["width"]  # values per token: the hidden states of all taps, then the final one
        self.dtype: str = facts["dtype"]
        self.num_held_out: int = facts["num_held_out"]
        self.starts = [0, *accumulate(len(text.token_ids) for text in self.texts)]
        self.tokens = torch.tensor([token_id for text in self.texts for token_id in text.token_ids])
        self.hidden_path = folder / "hidden.bin"

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    def __len__(self) -> int:
        """Returns the number of texts, counted from the first, whose hidden states are in the file."""
        size = self.hidden_path.stat().st_size if self.hidden_path.is_file() else 0
        return bisect.bisect_right(self.starts, size // self.row_bytes) - 1

    @cached_property
    def hidden(self) -> Tensor:
        """[num_tokens, width]: the hidden states of the texts that the file had at the first access.

        They take memory only when they are read.
        """
        num_rows = self.starts[len(self)]
        flat = torch.from_file(str(self.hidden_path), size=num_rows * self.width, dtype=TORCH_DTYPES[self.dtype])
        return flat.view(num_rows, self.width)

    @property
    def features(self) -> Tensor:
        """[num_tokens, num_taps * hidden_size]: the inputs of a head. If there are no taps, the final hidden states."""
        return self.hidden[:, : max(self.width - self.hidden_size, self.hidden_size)]

    @property
    def final(self) -> Tensor:
        """[num_tokens, hidden_size]: the target's final hidden states, after its final norm."""
        return self.hidden[:, -self.hidden_size :]

    @property
    def held_out(self) -> range:
        return range(min(self.num_held_out, len(self)))

    @property
    def training(self) -> range:
        return range(self.num_held_out, len(self))

    def rows(self, text: int) -> slice:
        """Returns the text's rows in `tokens` and `hidden`."""
        return slice(self.starts[text], self.starts[text + 1])

    def answer_counts(self, vocab_size: int) -> Tensor:
        """Returns [vocab_size]: the number of times that each token occurs in the answers of the training texts."""
        answered = [token_id for text in self.training for token_id in self.texts[text].response]
        return torch.bincount(torch.tensor(answered, dtype=torch.long), minlength=vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Several texts, padded at their ends, and the rows at which the target decides tokens of answers.

    A row is a token of a text; that token's final hidden state decides the next token. Step j of a chain is evaluated
    only at rows that are at least j tokens after the first row of their answer.
    """

    token_ids: Tensor  # [num_texts, num_tokens] int64
    features: Tensor  # [num_texts, num_tokens, num_taps * hidden_size]: the inputs of the head
    texts: Tensor  # [num_rows] int64
    places: Tensor  # [num_rows] int64: the positions of the rows in their texts
    depths: Tensor  # [num_rows] int64: number of answer tokens before the one that the row decides
    final: Tensor  # [num_rows, hidden_size]: the target's final hidden states, after its final norm
    first_chain: int  # index of the first chain that reaches a row

    @classmethod
    def of(cls, dataset: Dataset, texts: Sequence[int], device: torch.device) -> Batch:
        rows, starts = [dataset.rows(text) for text in texts], [len(dataset.texts[text].prompt) - 1 for text in texts]
        places = [torch.arange(first, each.stop - each.start - 1) for each, first in zip(rows, starts, strict=True)]
        tensors = {
            "token_ids": pad_sequence([dataset.tokens[each] for each in rows], batch_first=True),
            "features": pad_sequence([dataset.features[each] for each in rows], batch_first=True),
            "texts": torch.cat([torch.full_like(each, place) for place, each in enumerate(places)]),
            "places": torch.cat(places),
            "depths": torch.cat([each - each[0] for each in places]),
            "final": torch.cat([dataset.final[each][own] for each, own in zip(rows, places, strict=True)]),
        }
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return cls(**on_device, first_chain=min(starts) + 1 - MIN_PROMPT_TOKENS)
