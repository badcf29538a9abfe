"""A head in training computes the same as when it drafts row by row with a cache."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head
from outrider.training.dataset import Batch
from tests.heads.golden_files import logits_of
from tests.heads.golden_heads import block_logits
from tests.training.toy import HIDDEN, TAPS, VOCAB, ToyTarget, toy_dataset, toy_student

LENGTH, START = 14, 9


@pytest.fixture
def toy_folder(tmp_path):
    """The toy target as a checkpoint with the tensors that heads read."""
    toy, folder = ToyTarget(), tmp_path / "toy"
    folder.mkdir()
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    tensors = {"model.embed_tokens.weight": toy.embedding(), "lm_head.weight": toy.output_layer()}
    save_file({**tensors, "model.norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")
    return folder


def rounded(student):
    """Rounds the weights to bfloat16, as `export` does."""
    with torch.no_grad():
        for weight in student.weights.values():
            weight.copy_((weight + 0.1 * torch.randn_like(weight)).bfloat16())
    if (scale := student._scale) is not None:
        scale.copy_(2.0 ** torch.randint(-3, 3, scale.shape))  # powers of two are folded into fc without rounding
    return student


VARIANTS = ({"norm_before_residual": True}, {"norm_output": True}, {"num_layers": 2})


@pytest.mark.parametrize("size", [VOCAB, 30])
@pytest.mark.parametrize("options", [{}, *VARIANTS])
def test_training_equals_drafting_with_the_exported_folder(plan_of, toy_folder, options, size):
    plan, depths = plan_of(), 3
    student = rounded(toy_student("eagle3", size=size, **options))
    plan.out.mkdir()
    student.export(plan.out)
    head = open_head(plan.out, Target.open(toy_folder), torch.device("cpu"), torch.float32)

    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(LENGTH, HIDDEN * len(TAPS), generator=generator)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator)
    drafted = torch.randint(VOCAB, (depths,), generator=generator)  # by the chain of row START, from depth 1 on

    with torch.no_grad():
        chains, trained = student.start(taps, [0], [LENGTH]), []
        for depth in range(depths):
            fed = torch.cat([tokens[1:], tokens[:1]]) if not depth else torch.full((LENGTH,), int(drafted[depth]))
            student.step(chains, fed)
            logits, _ = student.logits(chains, torch.tensor([START]))
            trained.append(logits[0])

        features = head.reduction.to("cpu", torch.float32)(taps[: START + 1])
        served = logits_of(head, torch.cat([tokens[: START + 2], drafted[1:]]), features)
    ids = student.target_ids
    assert len(ids) == size
    assert (None if head.target_ids is None else head.target_ids.tolist()) == (None if size == VOCAB else ids.tolist())
    torch.testing.assert_close(torch.stack(trained), served, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("size", "num_layers"), [(VOCAB, 1), (30, 2)])
def test_training_a_block_equals_drafting_with_the_exported_folder(plan_of, toy_folder, size, num_layers):
    plan, num_tokens = plan_of(form="dspark"), 3
    student = rounded(toy_student("dspark", size=size, num_layers=num_layers))
    plan.out.mkdir()
    student.export(plan.out)
    head = open_head(plan.out, Target.open(toy_folder), torch.device("cpu"), torch.float32)
    assert head.spec.num_parallel == num_tokens
    assert len(student.target_ids) == size

    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(LENGTH, HIDDEN * len(TAPS), generator=generator)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator)
    found = []

    def choose(_depth, logits):
        found.append(logits)
        return logits.argmax(-1)

    with torch.no_grad():
        drafts = student.draft(taps, tokens, num_tokens, choose)
        for row in (0, START, LENGTH - 2):
            features = head.reduction.to("cpu", torch.float32)(taps[: row + 1])
            served = block_logits(head, tokens[: row + 2], features)
            torch.testing.assert_close(torch.stack(found)[:, row], served, atol=2e-4, rtol=2e-4)
            assert drafts[row].tolist() == student.target_ids[served.argmax(-1)].tolist()


def test_the_losses_of_a_block_are_those_of_its_drafts(plan_of):
    """A row is judged by the block that begins `step` tokens before it, as in the answer up to there."""
    dataset, student = toy_dataset(plan_of()), toy_student("dspark")
    with torch.no_grad():
        for weight in student.weights.values():
            weight.add_(0.1 * torch.randn_like(weight))
        texts = list(dataset.training)[:3]
        losses, counts, hits, reached = student.losses(Batch.of(dataset, texts, torch.device("cpu")), 3)
        chain = 0
        for text in texts:
            tokens, features, final = dataset.token_ids(text).long(), dataset.features(text), dataset.final(text)
            for anchor in range(int(dataset.prompt_lengths[text]) - 1, len(tokens) - 1):
                chains = student.start(features[:anchor], [anchor - 1], [1])
                for step in range(3):
                    place = anchor + 1 + step
                    assert reached[step, chain] == counts[step, chain] == (place < len(tokens))
                    if place < len(tokens):
                        student.step(chains, tokens[place - 1 : place] if step else tokens[1:place])
                        after, _ = student.logits(chains)
                        wanted = (student.target_output @ final[place - 1]).softmax(-1)
                        expected = torch.nn.functional.cross_entropy(after, wanted[None])
                        torch.testing.assert_close(losses[step, chain], expected)
                        assert hits[step, chain] == (after.argmax() == wanted.argmax())
                chain += 1


@pytest.mark.parametrize("form", ["eagle3", "dspark"])
def test_chains_that_are_left_out_change_no_other(form):
    student, first = toy_student(form), 6
    taps, tokens = torch.randn(LENGTH, HIDDEN * len(TAPS)), torch.randint(VOCAB, (3, LENGTH))
    with torch.no_grad():
        every, some = student.start(taps, [0], [LENGTH]), student.start(taps, [first], [LENGTH - first])
        for depth in range(3):
            student.step(every, tokens[depth])
            student.step(some, tokens[depth][first:] if depth else tokens[0])
            torch.testing.assert_close(every.hidden[first:], some.hidden, atol=1e-5, rtol=1e-5)


def test_channels_are_scaled_by_medians_which_the_first_token_does_not_move():
    student = toy_student("eagle3")
    sample = torch.randn(2000, HIDDEN * len(TAPS))
    student.scale_features(sample)
    before = student._scale.clone()
    sample[0] = 25_000.0
    student.scale_features(sample)
    torch.testing.assert_close(student._scale, before, rtol=0.05, atol=0)
