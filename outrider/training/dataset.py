"""What a head learns from, in files: the chosen answers' tokens, and the target's hidden states at each of them.

Three files in the run's working folder: index.json says which texts were chosen, and tokens.bin has their ids; both are
written once. hidden.bin grows text by text. Its size says how many texts are there, so a killed run goes on.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.paged_cache import TORCH_DTYPES
from outrider.errors import ConfigError
from outrider.node import DTYPE_BYTES
from outrider.training.answer_files import KeptAnswer
from outrider.training.generate import held_out
from outrider.training.plan import TrainingPlan, write_atomically

MIN_PROMPT_TOKENS = 2  # the first chain begins before the answer's first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Facts about the chosen texts, each a prompt with its answer. Held-out texts come first, the others shuffled."""

    width: int  # of hidden states: that of all taps
    dtype: str
    lengths: list[int]  # tokens
    prompt_lengths: list[int]
    temperatures: list[float]
    kinds: list[str]
    num_held_out: int

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    @classmethod
    def read(cls, folder: Path) -> Index | None:
        """None: nothing has been chosen yet."""
        path = folder / "index.json"
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def choose_texts(
    plan: TrainingPlan, answers: Iterable[KeptAnswer], *, vocab_size: int, width: int, dtype: str
) -> Index:
    """Writes index.json and tokens.bin. Texts that are too long, and the oldest over the bound of bytes, stay out.

    Raises: ConfigError when too little is left to learn from, or for answers of another model.
    """
    room = plan.max_feature_bytes // (width * DTYPE_BYTES[dtype])  # tokens
    fitting: deque[KeptAnswer] = deque()
    for answer in answers:
        if any(not 0 <= token_id < vocab_size for token_id in (*answer.prompt, *answer.response)):
            raise ConfigError(
                f"an answer has token ids that are not in 0 to {vocab_size - 1}: another model than the target gave it"
            )
        length = len(answer.prompt) + len(answer.response)
        if len(answer.prompt) < MIN_PROMPT_TOKENS or len(answer.response) < 2 or length > plan.max_length:
            continue
        fitting.append(answer)
        room -= length
        while room < 0:
            oldest = fitting.popleft()
            room += len(oldest.prompt) + len(oldest.response)
    first = held_out(fitting, plan.held_out_share)
    order = [index for index in range(len(fitting)) if index not in first]
    random.Random(plan.seed).shuffle(order)  # noqa: S311 no secret
    texts = [fitting[index] for index in (*sorted(first), *order)]
    if not order or not first:
        raise ConfigError(
            f"{len(fitting)} answers of 2 to {plan.max_length} tokens are too few to train and to hold some out: give "
            f"more --minutes, or more prompts"
        )
    index = Index(
        width=width,
        dtype=dtype,
        lengths=[len(text.prompt) + len(text.response) for text in texts],
        prompt_lengths=[len(text.prompt) for text in texts],
        temperatures=[text.temperature for text in texts],
        kinds=[text.kind for text in texts],
        num_held_out=len(first),
    )
    folder = features_folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([np.array([*text.prompt, *text.response], dtype=np.int32) for text in texts])
    tokens.tofile(folder / "tokens.bin")
    write_atomically(folder / "index.json", json.dumps(asdict(index)))
    return index


def features_folder(plan: TrainingPlan) -> Path:
    return plan.work / "features"


class Dataset:
    """The texts whose hidden states are there, mapped from their files."""

    def __init__(self, folder: Path) -> None:
        index = Index.read(folder)
        assert index is not None, "texts are chosen first"
        self.index = index
        self.starts = np.concatenate([[0], np.cumsum(index.lengths)])
        self.hidden_path = folder / "hidden.bin"
        self.tokens = torch.from_numpy(np.fromfile(folder / "tokens.bin", dtype=np.int32)).long()

    def __len__(self) -> int:
        """The number of texts whose hidden states are there, from the first on."""
        size = self.hidden_path.stat().st_size if self.hidden_path.is_file() else 0
        return int(np.searchsorted(self.starts, size // self.index.row_bytes, side="right")) - 1

    @cached_property
    def hidden(self) -> Tensor:
        """[num_tokens, width] of the texts that are there now; what is read of it takes memory."""
        num_rows = int(self.starts[len(self)])
        dtype = TORCH_DTYPES[self.index.dtype]
        flat = torch.from_file(str(self.hidden_path), size=num_rows * self.index.width, dtype=dtype)
        return flat.view(num_rows, self.index.width)

    @property
    def held_out(self) -> range:
        return range(min(self.index.num_held_out, len(self)))

    @property
    def training(self) -> range:
        return range(self.index.num_held_out, len(self))

    def rows(self, text: int) -> slice:
        """Of `tokens` and `hidden`."""
        return slice(int(self.starts[text]), int(self.starts[text + 1]))

    def answer_counts(self, vocab_size: int) -> Tensor:
        """[vocab_size]: how often each token was answered, in texts to learn from."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for text in self.training:
            rows = self.rows(text)
            counts += torch.bincount(
                self.tokens[rows.start + self.index.prompt_lengths[text] : rows.stop], minlength=vocab_size
            )
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some texts, padded at their ends; and the rows in which the target decides a token of an answer.

    A row is a token of a text: its final hidden state decides the next token. A chain's step j can be compared with
    rows that are at least j tokens behind their answer's first row.
    """

    token_ids: Tensor  # [num_texts, num_tokens] int64
    features: Tensor  # [num_texts, num_tokens, num_taps * hidden_size]: what the head is fed with
    texts: Tensor  # [num_rows] int64
    places: Tensor  # [num_rows] int64: of the rows in their texts
    depths: Tensor  # [num_rows] int64: tokens of the answer before the row's
    final: Tensor  # [num_rows, hidden_size]: the target's, behind its final norm
    first_chain: int  # chains before it meet no row

    @classmethod
    def of(cls, dataset: Dataset, texts: Sequence[int], *, hidden_size: int, has_own_final: bool) -> Batch:
        """`has_own_final`: the last tap is for comparison only; else features are the final hidden states."""
        index = dataset.index
        length = max(index.lengths[text] for text in texts)
        width = index.width - hidden_size if has_own_final else index.width
        token_ids = torch.zeros(len(texts), length, dtype=torch.long)
        features = torch.zeros(len(texts), length, width, dtype=dataset.hidden.dtype)
        places, finals = [], []
        for place, text in enumerate(texts):
            rows, size, prompt_length = dataset.rows(text), index.lengths[text], index.prompt_lengths[text]
            token_ids[place, :size] = dataset.tokens[rows]
            features[place, :size] = dataset.hidden[rows, :width]
            places.append(torch.arange(prompt_length - 1, size - 1))
            finals.append(dataset.hidden[rows.start + prompt_length - 1 : rows.stop - 1, -hidden_size:])
        return cls(
            token_ids=token_ids,
            features=features,
            texts=torch.cat([torch.full_like(each, place) for place, each in enumerate(places)]),
            places=torch.cat(places),
            depths=torch.cat([torch.arange(len(each)) for each in places]),
            final=torch.cat(finals),
            first_chain=min(index.prompt_lengths[text] for text in texts) - MIN_PROMPT_TOKENS,
        )

    def to(self, device: torch.device) -> Batch:
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__[:-1]}
        return Batch(**tensors, first_chain=self.first_chain)
