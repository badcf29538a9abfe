"""`lora_request`: adapters are loaded when they are first used, and requests name them."""

from __future__ import annotations

import pytest

from outrider import LLM, LoRARequest

SQL, LAW = LoRARequest("sql", 1, "/adapters/sql"), LoRARequest("law", 2, "adapters/law")


@pytest.fixture
def lora_llm(router, clusters):
    with LLM(enable_lora=True) as llm:
        yield llm


def test_adapters_are_loaded_once_and_each_prompt_names_its_own(lora_llm, router, clusters, monkeypatch, tmp_path):
    assert "model.adapter_directory=/" in clusters[0].launch.overrides
    monkeypatch.chdir(tmp_path)
    lora_llm.generate(["a", "b", "c"], lora_request=[SQL, None, LAW], use_tqdm=False)
    named = {"".join(map(chr, each.token_ids.ids)): (each.model, each.adapter_fingerprint) for each in router.requests}
    assert named == {"a": ("sql", "f" * 64), "b": ("", ""), "c": ("law", "f" * 64)}
    lora_llm.chat([{"role": "user", "content": "d"}], lora_request=LAW, use_tqdm=False)
    assert router.requests[-1].model == "law"
    assert router.loaded == [("sql", "/adapters/sql"), ("law", str(tmp_path / "adapters/law"))], "below any root"
    assert router.load_seconds > 60.0, "a node may take a minute"


def test_adapters_that_a_restarted_router_does_not_have_are_loaded_again(lora_llm, router):
    lora_llm.generate(["a", "b"], lora_request=SQL, use_tqdm=False)
    router.adapters = {}
    lora_llm.generate(["a", "b"], lora_request=SQL, use_tqdm=False)
    assert router.loaded == [("sql", "/adapters/sql")] * 2


def test_what_cannot_be_used_is_an_error_before_anything_is_generated(lora_llm, router):
    with pytest.raises(ValueError, match="there are 2 prompts, but 1 lora_requests"):
        lora_llm.generate(["a", "b"], lora_request=[SQL], use_tqdm=False)
    with pytest.raises(ValueError, match="lora_request 'x': decode-0: none is no adapter"):
        lora_llm.generate("a", lora_request=LoRARequest("x", 1, "/none"), use_tqdm=False)
    lora_llm.generate("a", lora_request=SQL, use_tqdm=False)
    with pytest.raises(ValueError, match="lora_request 'sql' is /adapters/sql already, not /other"):
        lora_llm.generate("a", lora_request=LoRARequest("sql", 1, "/other"), use_tqdm=False)
    assert len(router.requests) == 1


def test_adapters_must_be_enabled(router, clusters):
    with LLM() as llm:
        assert not any("adapter_directory" in override for override in clusters[0].launch.overrides)
        with pytest.raises(ValueError, match=r"needs LLM\(enable_lora=True\)"):
            llm.generate("a", lora_request=SQL, use_tqdm=False)
