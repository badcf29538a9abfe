"""READ FIRST: opens a safetensors checkpoint, plain or quantised, as a mapping that reads each tensor when it is used.

`methods` chooses how a checkpoint's `quantization_config` is read. Each other module reads one family of formats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.engine.cpu_kernels.grouped_weight import GroupedWeight
from outrider.engine.kv_cache.array_plane import Words
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.lazy_tensors import LazyTensors, Tensors
from outrider.model_hub.quantised.methods import choose_scheme, quantization_of
from outrider.model_hub.quantised.scheme import Scheme
from outrider.model_hub.safetensors_files import SafetensorsFiles

_ACTIVATION_PARTS = frozenset(
    {f"{what}_scale" for what in ("activation", "input", "output", "q", "k", "v", "kv")}
    | {f"{what}_{part}" for what in ("input", "output") for part in ("zero_point", "global_scale", "scale_ub")}
)
"""Last parts of the names of tensors that quantise activations or the KV cache. Our kernels do this by themselves."""


def open_safetensors(directory: Path) -> Tensors:
    """Opens the checkpoint, which stays on disk until a tensor is used.

    Weights quantised to integers are read as GroupedWeight, exactly, and FP8 weights are dequantised to bfloat16.
    float16 is widened to float32, exactly.

    Raises: ModelError if a file is missing or damaged, or if the quantization is one that is not read
    (`methods.why_not_readable`). Reading a tensor raises ModelError if it, or a part of it, cannot be read.
    """
    files, quantization = SafetensorsFiles(directory), quantization_of(read_json(directory / "config.json"))
    if not quantization:
        return LazyTensors({name: partial(_plain, files, name) for name in files})
    scheme = choose_scheme(quantization)
    quantised = {name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in scheme.markers}
    readers: dict[str, Callable[[], Words | GroupedWeight]] = {}
    for name in files:
        module, _, part = name.rpartition(".")
        if module in quantised and part in scheme.parts:
            readers[f"{module}.weight"] = partial(_quantised, files, module, scheme)
        elif part not in _ACTIVATION_PARTS:
            readers[name] = partial(_plain, files, name)
    return LazyTensors(readers)


def _plain(files: SafetensorsFiles, name: str) -> Words:
    """Returns a tensor that is not quantised. Raises: ModelError if its type is not one of plain weights."""
    return files[name] if files.types[name] == "BF16" else files.floats(name)


def _quantised(files: SafetensorsFiles, module: str, scheme: Scheme) -> Words | GroupedWeight:
    """Returns a quantised module's weight. Raises: ModelError that names the module or a part of it."""
    try:
        return scheme.read(files, module)
    except KeyError as error:
        raise ModelError(f"{files.directory} has no {error.args[0]}: the weights are incomplete") from error
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"{files.directory}: the weight of {module} cannot be read: {error}") from error
