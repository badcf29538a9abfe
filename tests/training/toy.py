"""A data set that needs no real target. Its hidden states determine the next token."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.features import FeatureReduction
from outrider.heads.checkpoint import Checkpoint
from outrider.model_hub.config import ModelConfig
from outrider.training.answer_files import KeptAnswer
from outrider.training.block_student import BlockStudent
from outrider.training.dataset import choose_texts
from outrider.training.new_heads import new_head
from outrider.training.plan import TrainingPlan
from outrider.training.student import Student

HIDDEN, VOCAB, TAPS = 32, 48, (1, 2)


class ToyTarget:
    """The part of outrider.heads.checkpoint.Target that training uses. Token t is followed by (5 t + 1) mod VOCAB."""

    hidden_size, vocab_size, num_layers, max_model_len = HIDDEN, VOCAB, 4, 512
    config = {  # noqa: RUF012
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    }

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self._embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._output = torch.randn(VOCAB, HIDDEN, generator=generator)

    def last_hidden_state(self):
        return FeatureReduction(taps=(self.num_layers,), hidden_size=HIDDEN, takes_final_norm=True)

    def embedding(self):
        return self._embedding

    def output_layer(self):
        return self._output

    def follower(self, token_id):
        return (5 * token_id + 1) % VOCAB

    def text(self, first, length):
        tokens = [first]
        while len(tokens) < length:
            tokens.append(self.follower(tokens[-1]))
        return tokens

    def hidden(self, tokens):
        """Returns two taps that determine the token and a state that determines the next, [len(tokens), 3 * HIDDEN]."""
        one = self._embedding[tokens]
        final = self._output[[self.follower(token) for token in tokens]]
        return torch.cat([one, 3 * one, final], -1)


def toy_dataset(plan, *, num_texts=40):
    """Writes a data set to the plan's folder, and returns it."""
    target = ToyTarget()
    answers = [
        KeptAnswer(text[:4], text[4:], float(number % 2), ("chat", "code")[number % 3 == 0])
        for number in range(num_texts)
        for text in [target.text(number % VOCAB, 12 + number % 9)]
    ]
    dataset = choose_texts(plan, answers, vocab_size=VOCAB, hidden_size=HIDDEN, num_taps=len(TAPS), dtype="float32")
    for shard in range(len(dataset.shards)):
        write_toy_shard(dataset, shard)
    return dataset


def write_toy_shard(dataset, shard):
    with dataset.path(shard).open("wb") as file:
        for text in dataset.shards[shard]:
            hidden = ToyTarget().hidden(dataset.token_ids(text).tolist())[:, -dataset.width :]
            file.write(hidden.contiguous().numpy().tobytes())


def toy_student(form, *, num_steps=3, size=VOCAB, num_layers=1, **options):
    """Makes a student. `num_layers` and other options of config.json apply to eagle3 and dspark heads."""
    torch.manual_seed(0)
    plan = TrainingPlan(
        out=Path("toy"),
        model=ModelConfig(),
        form=form,
        num_steps=num_steps,
        num_layers=num_layers,
        rank=8,
        draft_vocab_size=size,
    )
    new = new_head(plan, ToyTarget(), "toy", torch.arange(VOCAB, 0, -1), torch.device("cpu"))
    tensors = {name: new.mapped(name) for name in new.tensor_names}
    if num_layers > 1 and form == "eagle3":
        options["transformer_layer_config"] = {**new.config["transformer_layer_config"], "num_hidden_layers": 2}
        for name in new.tensor_names - {"layers.0.hidden_norm.weight"}:
            if name.startswith("layers.0."):  # only the first layer reads embeddings beside hidden states
                width = HIDDEN if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else None
                tensors[name.replace("layers.0.", "layers.1.")] = tensors[name][..., :width].contiguous()
    checkpoint = Checkpoint.in_memory(plan.out, {**new.config, **options}, tensors)
    kind = BlockStudent if form == "dspark" else Student
    return kind(checkpoint, ToyTarget(), torch.device("cpu"), torch.float32)
