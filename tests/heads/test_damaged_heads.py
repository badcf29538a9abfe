"""Damaged or malicious heads are refused when they are opened, with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError
from outrider.heads.checkpoint import Target
from outrider.heads.open import open_head, read_reduction
from tests.heads import golden_files
from tests.heads.golden_heads import CPU, assert_logits, logits_of, opened, rewrite_tensors
from tests.support.head_files import HEADS, make_head
from tests.support.tiny_model import make_tiny_model

FORMS = sorted(HEADS)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(params=FORMS)
def head(request, target, tmp_path):
    return make_head(request.param, tmp_path / "head", target)


def refusal(head, target, kind=ModelError) -> str:
    with pytest.raises(kind) as error:
        open_head(head, Target.open(target), CPU, torch.float32)
    return error.value.message


def change_config(head, change):
    path = head / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_weights_that_are_not_finite_are_refused_by_name(head, target):
    whole = load_file(head / "model.safetensors")
    for name, value in zip(sorted(whole), [float("nan"), float("inf")] * len(whole), strict=False):
        if whole[name].is_floating_point():
            damaged = whole[name].clone()
            damaged.view(-1)[-1] = value
            save_file(whole | {name: damaged}, head / "model.safetensors")
            assert f"{name} has values that are not finite" in refusal(head, target)


def test_weights_of_another_shape_are_refused(head, target):
    whole = load_file(head / "model.safetensors")
    for name, tensor in whole.items():
        save_file(whole | {name: torch.cat([tensor, tensor])}, head / "model.safetensors")
        refusal(head, target, (ModelError, ConfigError))


def test_quantised_weights_are_refused_by_their_type(head, target):
    whole = load_file(head / "model.safetensors")
    name = next(name for name in sorted(whole) if whole[name].dim() == 2)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file(whole | {name: whole[name].to(dtype)}, head / "model.safetensors")
        assert f"{name} is of {dtype}" in refusal(head, target)


def test_buffers_that_say_nothing_are_no_reason_to_refuse(head, target):
    buffers = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq", "mtp_layers.0.rotary_emb.inv_freq")
    rewrite_tensors(head, lambda own: own | {name: torch.ones(8) for name in buffers})
    assert open_head(head, Target.open(target), CPU, torch.float32).spec.name == "head"


def test_a_file_that_ends_early_is_refused_by_its_path(head, target):
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path} cannot be read" in refusal(head, target)
    path.write_bytes(b"<html>")
    assert f"{path} cannot be read" in refusal(head, target)


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": 5}', '{"speculators_model_type": []}'])
def test_a_configuration_that_is_none_is_refused(head, target, text):
    (head / "config.json").write_text(text)
    assert str(head) in refusal(head, target, (ModelError, ConfigError))


def test_without_a_configuration_there_is_no_head(head, target):
    (head / "config.json").unlink()
    assert "has no config.json" in refusal(head, target)


@pytest.mark.parametrize("value", ["many", -1, None, {}])
def test_a_field_of_another_type_or_size_is_refused(head, target, value):
    config = json.loads((head / "config.json").read_text())
    nested = config.get("transformer_layer_config", config)
    numbers = [name for name, each in nested.items() if type(each) is int]
    assert numbers
    ignored = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
    needed = {"hidden_size", "num_attention_heads", "medusa_num_heads", "emb_dim", "n_predict"} & {*numbers} - ignored
    for name in needed:
        (head / "config.json").write_text(json.dumps(config))
        change_config(head, lambda own, name=name: own.get("transformer_layer_config", own).update({name: value}))
        refusal(head, target, (ModelError, ConfigError))


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 0}, {"num_attention_heads": 0}, {"num_key_value_heads": 3}, {"head_dim": 7}],
)
def test_layers_of_no_possible_shape_are_refused(target, tmp_path, changes):
    head = make_head("eagle3", tmp_path / "head", target)
    change_config(head, lambda own: own.update(changes))
    refusal(head, target, (ModelError, ConfigError))


@pytest.mark.parametrize("form", ["eagle3", "medusa"])
def test_own_ids_may_come_in_any_order_but_once_each_and_of_the_vocabulary(target, tmp_path, form):
    head = make_head(form, tmp_path / "head", target)
    name = {"eagle3": "d2t", "medusa": "token_map"}[form]
    first = torch.arange(120) if form == "eagle3" else 0
    ids = load_file(head / "model.safetensors")[name] + first
    rewrite_tensors(head, lambda own: own | {name: ids.flip(0) - first})
    assert torch.equal(open_head(head, Target.open(target), CPU, torch.float32).target_ids, ids.flip(0))
    for wrong in (320, -1, 1 << 62, int(ids[1])):
        rewrite_tensors(
            head, lambda own, wrong=wrong: own | {name: torch.cat([torch.tensor([wrong]), ids[1:]]) - first}
        )
        assert f"{name} has ids outside 0 … 319, or the same id twice" in refusal(head, target)


def test_ids_of_a_whole_vocabulary_in_another_order_are_not_ignored(target, tmp_path):
    head, ids = make_head("eagle3", tmp_path / "head", target), torch.arange(320)
    change_config(head, lambda own: own.update(draft_vocab_size=320))
    for order, expected in ((ids, None), (ids.flip(0), ids.flip(0).tolist())):
        whole = {"lm_head.weight": torch.ones(320, 64), "d2t": order - ids}
        rewrite_tensors(head, lambda own, whole=whole: own | whole)
        found = open_head(head, Target.open(target), CPU, torch.float32).target_ids
        assert (found if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("form", "named", "change"),
    [
        ("dflash", "tokens in a forward is 0", lambda own: own["dflash_config"].update(block_size=1)),
        ("dflash", "tokens in a forward is 999", lambda own: own["dflash_config"].update(block_size=1000)),
        ("dflash", "mask_token_id is 320", lambda own: own["dflash_config"].update(mask_token_id=320)),
        ("peagle", "mask_token_id is -1", lambda own: own.update(mask_token_id=-1)),
    ],
)
def test_a_block_that_cannot_be_drafted_is_refused(target, tmp_path, form, named, change):
    head = make_head(form, tmp_path / "head", target)
    change_config(head, change)
    assert named in refusal(head, target, ConfigError)


def test_a_target_is_what_transformers_loads_of_it_up_to_the_longest_window(tmp_path):
    """Repositories may have the same tensors in other files as well, some of which are older."""
    target = make_tiny_model(tmp_path)
    own = Target.open(target).embedding().clone()
    save_file({"model.embed_tokens.weight": torch.zeros_like(own)}, target / "original.safetensors")
    change_config(target, lambda config: config.update(max_position_embeddings=4 << 20))
    assert torch.equal(Target.open(target).embedding(), own)
    assert Target.open(target).max_model_len == 1 << 20


def test_what_is_open_does_not_change_with_its_file(tmp_path):
    """If files were mapped, overwriting one would change the weights, and truncating one would end the process."""
    for name in ("eagle3", "dflash"):
        golden = golden_files.unpack(name, tmp_path / name)
        head, reduction = opened(golden), read_reduction(golden.head, Target.open(golden.target))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.heads.golden_heads.opened", lambda _golden, head=head: head)
            path = golden.head / "model.safetensors"
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.seek(size // 4)
                file.write(bytes(size - size // 4))
            assert_logits(logits_of(golden), golden.logits)
            assert torch.equal(reduction.projection, head.reduction.projection)
            assert reduction.projection.abs().min() > 0


def test_a_head_has_the_name_of_its_folder_however_that_is_written(target, tmp_path, monkeypatch):
    head = make_head("medusa", tmp_path / "parrot", target)
    monkeypatch.chdir(head)
    assert open_head(type(head)(), Target.open(target), CPU, torch.float32).spec.name == "parrot"
