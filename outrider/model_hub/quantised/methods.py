"""The quantization methods: which are read here, and which package transformers needs for each on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from outrider.errors import ModelError
from outrider.model_hub.quantised import awq, compressed_tensors, fp8, gptq
from outrider.model_hub.quantised.scheme import ADVICE, Scheme

_Configuration = Mapping[str, Any]
_SCHEMES: Mapping[str, Callable[[_Configuration], Scheme | str]] = {
    "awq": awq.scheme,
    "compressed-tensors": compressed_tensors.scheme,
    "fbgemm_fp8": fp8.scheme,
    "fp8": fp8.scheme,
    "gptq": gptq.scheme,
}
_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "aqlm": {"aqlm": "aqlm[gpu]"},
    "auto-round": {"auto_round": "auto-round>=0.5"},
    "awq": {"gptqmodel": "gptqmodel"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors>=0.15.0"},
    "fbgemm_fp8": {"fbgemm_gpu": "fbgemm-gpu"},
    "fp8": {"kernels": "kernels"},
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum"},
    "hqq": {"hqq": "hqq"},
    "torchao": {"torchao": "torchao"},
}
"""For each method: the modules that transformers 5 imports to run it on a GPU, and what to install for each. Methods
that are not here need nothing, or transformers' own error names the package."""


def quantization_of(config: _Configuration) -> _Configuration:
    """Returns the `quantization_config` of a config.json; empty for plain weights."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found or {}


def method_of(quantization: _Configuration) -> str:
    """Returns the method's name, such as "awq"."""
    is_old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return str(quantization.get("quant_method") or ("bitsandbytes" if is_old else "unnamed"))


def why_not_readable(quantization: _Configuration) -> str:
    """Returns why `open_safetensors` cannot read the weights, and what to do; "" if it can."""
    found = _scheme(quantization)
    return f"{found}: {ADVICE}" if isinstance(found, str) else ""


def choose_scheme(quantization: _Configuration) -> Scheme:
    """Returns how the weights are read. Raises: ModelError if they cannot be."""
    found = _scheme(quantization)
    if isinstance(found, str):
        raise ModelError(f"{found}: {ADVICE}")
    return found


def _scheme(quantization: _Configuration) -> Scheme | str:
    method = method_of(quantization)
    if method in _SCHEMES:
        return _SCHEMES[method](quantization)
    return f"its weights are quantized by {method}, and on a CPU only by {', '.join(_SCHEMES)} are supported"


def gpu_package(method: str) -> str | None:
    """Returns what to install so that transformers can run the method on a GPU, such as "gptqmodel optimum".

    Returns None if nothing is missing. Without the package for "fp8", GPUs of a compute capability below 8.9 still
    work, because transformers dequantises the weights for them.
    """
    packages = _PACKAGES.get(method, {})
    return " ".join(package for module, package in packages.items() if find_spec(module) is None) or None
