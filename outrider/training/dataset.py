"""The data set of a run: the chosen answers, and the target's hidden states at each of their tokens.

It is kept in the run's working folder. texts.npz holds the chosen answers as arrays and is written once. Hidden states
take kilobytes per token, so they are kept in shards, each of some texts in a file of its own, and only as many shards
as fit into `TrainingPlan.feature_bytes` exist at a time. A shard's file grows text by text. Its size tells how many
texts it has, so that a killed run can continue.
"""

from __future__ import annotations

import hashlib
import io
import random
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES
from outrider.errors import ConfigError
from outrider.node import DTYPE_BYTES
from outrider.training.answer_files import KeptAnswer
from outrider.training.plan import SEED, TrainingPlan, write_atomically

HELD_OUT_SHARE = 0.05  # fraction of prompts whose answers are held out
MAX_HELD_OUT_PROMPTS = 64  # of each kind of text
MIN_PROMPT_TOKENS = 2  # the chain that drafts an answer's first token needs a feature and the token after it
SHARDS_IN_BOUND = 8
HELD_OUT_SHARD = 0
TEXTS = "texts.npz"


def choose_texts(
    plan: TrainingPlan, answers: Iterable[KeptAnswer], *, vocab_size: int, hidden_size: int, num_taps: int, dtype: str
) -> Dataset:
    """Writes texts.npz. Leaves out texts that are too long.

    `num_taps`: the number of taps of the residual stream, not counting the final hidden state. Raises: ConfigError if
    too few texts remain, or if another model wrote an answer.
    """
    fitting: list[KeptAnswer] = []
    for answer in answers:
        if any(not 0 <= token_id < vocab_size for token_id in answer.token_ids):
            raise ConfigError(f"an answer has token ids outside 0 to {vocab_size - 1}: the target did not write it")
        prompt, response = (array("i", ids) for ids in (answer.prompt, answer.response))
        if len(prompt) >= MIN_PROMPT_TOKENS and len(response) >= 2 and len(prompt) + len(response) <= plan.max_length:
            fitting.append(replace(answer, prompt=prompt, response=response))
    chosen = held_out_prompts(fitting, HELD_OUT_SHARE)
    held_out = [answer for answer in fitting if prompt_key(answer.prompt) in chosen]
    others = [answer for answer in fitting if prompt_key(answer.prompt) not in chosen]
    if not held_out or not others:
        raise ConfigError(
            f"{len(fitting)} answers of 2 to {plan.max_length} tokens are too few for training and evaluation: "
            f"give more --minutes or more prompts"
        )
    random.Random(SEED).shuffle(others)  # noqa: S311 no secret
    folder, width = features_folder(plan), (num_taps + 1) * hidden_size
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.bin"):  # of a run that was killed before it had chosen its texts, or of an older version
        path.unlink()
    texts, kinds = [*held_out, *others], sorted({text.kind for text in fitting})
    arrays = {
        "tokens": np.concatenate([np.asarray(ids) for text in texts for ids in (text.prompt, text.response)]),
        "lengths": np.array([(len(text.prompt), len(text.response)) for text in texts], np.int32),
        "temperatures": np.array([text.temperature for text in texts]),
        "kinds": np.array([kinds.index(text.kind) for text in texts]),
        "kind_names": np.array(kinds),
        "num_held_out": np.array(len(held_out)),
        "hidden_size": np.array(hidden_size),
        "width": np.array(width),
        "dtype": np.array(dtype),
        "shard_tokens": np.array(max(1, plan.feature_bytes // (width * DTYPE_BYTES[dtype]) // SHARDS_IN_BOUND)),
    }
    _write(folder, arrays)
    return Dataset(folder)


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Returns a short digest by which prompts are told apart: a set of a million prompts would take a gigabyte."""
    return hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()


def held_out_prompts(answers: Iterable[KeptAnswer], share: float) -> set[bytes]:
    """Returns the keys of the prompts whose answers are held out: the fraction `share` of the prompts of each kind.

    At least one prompt is held out of each kind that has two or more, and at most `MAX_HELD_OUT_PROMPTS`. All answers
    to such a prompt are held out, because training on one of them would reveal the others.
    """
    by_kind: dict[str, set[bytes]] = {}
    for answer in answers:
        by_kind.setdefault(answer.kind, set()).add(prompt_key(answer.prompt))
    chosen: set[bytes] = set()
    for keys in by_kind.values():
        if len(keys) > 1:
            chosen.update(sorted(keys)[: min(max(1, round(share * len(keys))), MAX_HELD_OUT_PROMPTS)])
    return chosen


def features_folder(plan: TrainingPlan) -> Path:
    return plan.work / "features"


def _write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / TEXTS, content.getvalue())


class Dataset:
    """The chosen texts (prompts with their answers) and their hidden states, which are memory-mapped from files.

    Held-out texts come first and are shard 0; the others follow in random order, in shards of a similar size.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: FileNotFoundError if no texts have been chosen."""
        with np.load(folder / TEXTS) as kept:
            facts = self._facts = dict(kept)
        self._folder = folder
        self.hidden_size = int(facts["hidden_size"])
        self.width = int(facts["width"])  # values per token: the hidden states of all taps, then the final one
        self.dtype = str(facts["dtype"])
        self.num_held_out = int(facts["num_held_out"])
        self.tokens = torch.from_numpy(facts["tokens"])  # [num_tokens] int32, of all texts
        self.prompt_lengths, self.response_lengths = facts["lengths"].T  # [num_texts] int32
        self.starts = np.concatenate([[0], facts["lengths"].sum(1, dtype=np.int64).cumsum()])  # of texts in `tokens`
        self._temperatures = facts["temperatures"]
        self._kind_names, self._kinds = facts["kind_names"], facts["kinds"]  # the latter: [num_texts] indices
        self.shards = [range(self.num_held_out)]  # the texts of each shard
        self._hidden: dict[int, Tensor] = {}  # [num_tokens, width] by shard; it takes memory only when it is read
        for text in range(self.num_held_out, len(self)):
            last = self.shards[-1]
            if len(self.shards) == 1 or self.starts[text + 1] - self.starts[last.start] > int(facts["shard_tokens"]):
                self.shards.append(range(text, text + 1))
            else:
                self.shards[-1] = range(last.start, text + 1)

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self.starts) - 1

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    @property
    def held_out(self) -> range:
        return self.shards[HELD_OUT_SHARD]

    @property
    def training(self) -> range:
        return range(self.num_held_out, len(self))

    def shard_of(self, text: int) -> int:
        return bisect_right(self.shards, text, key=lambda texts: texts.start) - 1

    def kind(self, text: int) -> str:
        return str(self._kind_names[self._kinds[text]])

    def token_ids(self, text: int) -> Tensor:
        """[num_tokens] int32: the text's prompt and response."""
        return self.tokens[self.starts[text] : self.starts[text + 1]]

    def text(self, text: int) -> KeptAnswer:
        token_ids, size = self.token_ids(text).tolist(), int(self.prompt_lengths[text])
        return KeptAnswer(token_ids[:size], token_ids[size:], float(self._temperatures[text]), self.kind(text))

    def hidden(self, text: int) -> Tensor:
        """[num_tokens, width]: the text's hidden states, whose shard must be complete."""
        shard = self.shard_of(text)
        first, last = self.starts[self.shards[shard].start], self.starts[self.shards[shard].stop]
        if shard not in self._hidden:
            size, dtype = int(last - first) * self.width, TORCH_DTYPES[self.dtype]
            self._hidden[shard] = torch.from_file(str(self.path(shard)), size=size, dtype=dtype).view(-1, self.width)
        return self._hidden[shard][self.starts[text] - first : self.starts[text + 1] - first]

    def features(self, text: int) -> Tensor:
        """[num_tokens, num_taps * hidden_size]: the inputs of a head."""
        return self.hidden(text)[:, : -self.hidden_size]

    def final(self, text: int) -> Tensor:
        """[num_tokens, hidden_size]: the target's final hidden states, after its final norm."""
        return self.hidden(text)[:, -self.hidden_size :]

    def answer_counts(self, vocab_size: int) -> Tensor:
        """Returns [vocab_size]: the number of times that each token occurs in the answers of the training texts."""
        is_answer = np.repeat(np.tile([False, True], len(self)), self._facts["lengths"].ravel())
        is_answer[: self.starts[self.num_held_out]] = False
        return torch.bincount(self.tokens[torch.from_numpy(is_answer)], minlength=vocab_size)

    def path(self, shard: int) -> Path:
        """The file of a shard's hidden states."""
        return self._folder / f"hidden-{shard}.bin"

    def num_tokens(self, shard: int) -> int:
        return int(self.starts[self.shards[shard].stop] - self.starts[self.shards[shard].start])

    def num_done(self, shard: int) -> int:
        """Returns the number of texts of the shard whose hidden states are in its file."""
        path, texts = self.path(shard), self.shards[shard]
        size = path.stat().st_size if path.is_file() else 0
        ends = self.starts[texts.start + 1 : texts.stop + 1] - self.starts[texts.start]
        return int(np.searchsorted(ends, size // self.row_bytes, side="right"))

    def is_done(self, shard: int) -> bool:
        return self.num_done(shard) == len(self.shards[shard])

    def fits(self, shard: int, max_bytes: int) -> bool:
        """Returns whether the shard can be added without exceeding `max_bytes` for all shards that have files."""
        held = {shard, *(each for each in range(len(self.shards)) if self.path(each).is_file())}
        return sum(self.num_tokens(each) for each in held) * self.row_bytes <= max_bytes

    def make_room(self, shard: int, max_bytes: int) -> None:
        """Removes hidden states until the shard fits, or until only those of held-out texts are left.

        Passes visit the shards in order, so the shard that is needed last from now on is the one before this one.
        """
        num_shards = len(self.shards)
        for distance in range(1, num_shards):
            if self.fits(shard, max_bytes):
                return
            other = (shard - distance) % num_shards
            if other != HELD_OUT_SHARD:
                self._hidden.pop(other, None)
                self.path(other).unlink(missing_ok=True)

    def leave_out(self, first: int) -> Dataset:
        """Leaves out the texts from `first` on, for good. Returns the smaller data set."""
        by_text = {name: self._facts[name][:first] for name in ("lengths", "temperatures", "kinds")}
        _write(self._folder, {**self._facts, **by_text, "tokens": self._facts["tokens"][: self.starts[first]]})
        return Dataset(self._folder)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of several texts, not padded, in the order of outrider.training.student.Chains.

    A text's chains begin with the one that drafts the answer's first token. Step j of chain i of a text drafts token
    i + j of the text's answer.
    """

    token_ids: Tensor  # [num_rows] int64: the token after the feature of each row
    answers: Tensor  # [num_chains] int64: the tokens of all answers
    features: Tensor  # [num_rows, num_taps * hidden_size]: the inputs of the head
    final: Tensor  # [num_chains, hidden_size]: the final hidden states that decide the tokens of answers
    num_left: Tensor  # [num_chains] int64: number of answer tokens from the one that the first step drafts, to the end
    contexts: Sequence[int]  # number of context rows of each text
    lengths: Sequence[int]  # number of chains of each text

    @classmethod
    def of(cls, dataset: Dataset, texts: Sequence[int], device: torch.device) -> Batch:
        contexts = [int(dataset.prompt_lengths[text]) - MIN_PROMPT_TOKENS for text in texts]
        lengths = [int(dataset.response_lengths[text]) for text in texts]
        tokens = [dataset.token_ids(text).long() for text in texts]
        features = [dataset.features(text) for text in texts]
        spans = list(zip(tokens, features, contexts, strict=True))
        rows = [(ids[1 : first + 1], each[:first]) for ids, each, first in spans]
        rows += [(ids[first + 1 : -1], each[first:-2]) for ids, each, first in spans]
        tensors = {
            "token_ids": torch.cat([ids for ids, _ in rows]),
            "answers": torch.cat([ids[first + MIN_PROMPT_TOKENS :] for ids, _, first in spans]),
            "features": torch.cat([each for _, each in rows]),
            "final": torch.cat(
                [dataset.final(text)[first + 1 : -1] for text, first in zip(texts, contexts, strict=True)]
            ),
            "num_left": torch.cat([torch.arange(length, 0, -1) for length in lengths]),
        }
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return cls(**on_device, contexts=contexts, lengths=lengths)


def batches(dataset: Dataset, texts: Iterable[int], batch_tokens: int) -> Iterator[list[int]]:
    """Splits texts, in their order, into batches of at most `batch_tokens` answer tokens, but at least one text."""
    batch: list[int] = []
    room = batch_tokens
    for text in texts:
        room -= int(dataset.response_lengths[text])
        if batch and room < 0:
            yield batch
            batch, room = [], batch_tokens - int(dataset.response_lengths[text])
        batch.append(text)
    if batch:
        yield batch
