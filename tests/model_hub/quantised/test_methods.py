from __future__ import annotations

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from outrider.model_hub.quantised import methods
from outrider.model_hub.quantised.methods import gpu_package, method_of, quantization_of, why_not_readable


@pytest.mark.parametrize("method", ["awq", "compressed-tensors", "fp8", "fbgemm_fp8"])
def test_what_is_read(method):
    assert why_not_readable({"quant_method": method}) == ""


@pytest.mark.parametrize("method", sorted(set(AUTO_QUANTIZER_MAPPING) - set(methods._SCHEMES)))
def test_every_other_method_of_transformers_is_refused_by_name(method):
    why = why_not_readable({"quant_method": method})
    assert why.startswith(f"its weights are quantized by {method}, and on a CPU only by awq, ")
    assert why.endswith("serve the checkpoint that it was made from, with model.weights=int8 for half the memory")


def test_configurations_without_a_name():
    assert method_of({"load_in_8bit": True}) == "bitsandbytes"
    assert why_not_readable({"bits": 4}).startswith("its weights are quantized by unnamed")
    assert quantization_of({"model_type": "llama"}) == {}
    assert quantization_of({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == {"quant_method": "awq"}


def test_the_package_that_transformers_needs_on_a_gpu(monkeypatch):
    installed = {"optimum"}
    monkeypatch.setattr(methods, "find_spec", lambda name: name if name in installed else None)
    assert gpu_package("awq") == "gptqmodel"
    assert gpu_package("gptq") == "gptqmodel"
    assert gpu_package("compressed-tensors") == "compressed-tensors>=0.15.0"
    installed.clear()
    assert gpu_package("gptq") == "gptqmodel optimum"
    installed.add("gptqmodel")
    assert gpu_package("awq") is None
    assert gpu_package("a method that transformers does not know") is None
