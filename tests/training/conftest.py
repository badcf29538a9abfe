from __future__ import annotations

import random

import pytest

from outrider.model_hub.config import ModelConfig
from outrider.training.answer_files import AnswerWriter, KeptAnswer
from outrider.training.plan import TrainingPlan


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A folder of forty kept answers of two kinds. Each token after the first few depends only on the one before."""
    folder = tmp_path_factory.mktemp("kept")
    writer, rng = AnswerWriter(folder, max_bytes=1 << 20), random.Random(0)
    for number in range(40):
        first = rng.randrange(3, 290)
        token_ids = [3 + (first + 7 * place) % 90 for place in range(rng.randrange(24, 48))]
        writer.append(KeptAnswer(token_ids[:8], token_ids[8:], float(number % 2), ("chat", "code")[number % 2]))
    writer.close()
    return folder


@pytest.fixture
def plan_of(tmp_path, tiny_model, kept):
    """plan_of(**fields) → a TrainingPlan for the tiny model and the kept answers."""

    def make(**fields):
        fields = {"out": tmp_path / "head", "traffic": kept, "draft_vocab_size": 100, "num_steps": 3} | fields
        return TrainingPlan(model=ModelConfig(id=str(tiny_model), num_threads=1, dtype="float32"), **fields)

    return make
