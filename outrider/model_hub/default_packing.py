"""Packs the default model for the native kernels without torch, and checks it against recorded logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from outrider.engine.arrays import Array, namespace
from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.decoder_options import DecoderOptions, decoder_options
from outrider.engine.cpu_kernels.decoder_weights import DecoderWeights
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.packing import pack_weights
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.model_runner import make_runner
from outrider.engine.model_spec import ModelSpec
from outrider.engine.numerics import allowed_difference
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner
from outrider.errors import ModelError
from outrider.model_hub.checkpoint_text import read_json
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.safetensors_files import SafetensorsFiles
from outrider.model_hub.window import resolve_window

RECORDED_LOGITS = Path(__file__).with_name("default_logits.json")
"""transformers' logits in float32; `tests/model_hub/test_default_packing.py` recomputes and compares them."""

PROBE_BLOCKS = (24, 4)
"""Number of blocks, and number of tokens per block, of the cache for `probe_logits`."""
_BLOCK_TABLES = ((6, 1, 4, 20, 9, 23, 11, 3, 17, 14), (2, 7, 0, 22, 5, 19, 8, 16, 12, 21))
"""Block tables of the sequences of `probe_logits`."""


def pack_default_model(
    directory: Path, config: ModelConfig, kernels: CpuKernels
) -> tuple[ModelSpec, DecoderWeights] | None:
    """Packs the default model with the same bits as `load_model`.

    Returns None if `config` has a dtype other than bfloat16, which needs torch. Raises: ConfigError if
    `model.max_model_len` exceeds the model's window, ModelError if the kernels compute the model incorrectly.
    """
    if config.dtype not in ("auto", "bfloat16"):
        return None
    about, tensors = read_json(directory / "config.json"), SafetensorsFiles(directory)
    options = decoder_options(about)
    assert isinstance(options, DecoderOptions), options
    window = resolve_window(SimpleNamespace(**about), config.max_model_len)
    spec = options.spec(dtype="bfloat16", max_model_len=window.max_model_len)
    weights = pack_weights(kernels, options, spec, tensors, quantise=config.rounds_weights_to)
    _check(RunnableModel(model=None, native=NativeDecoder(kernels, weights), device="cpu", spec=spec), config)
    return spec, weights


def _check(model: RunnableModel, config: ModelConfig) -> None:
    """Compares the logits with the recorded ones. Raises: ModelError if they differ."""
    recorded = json.loads(RECORDED_LOGITS.read_bytes())
    logits = probe_logits(make_runner(model, model.make_cache(*PROBE_BLOCKS)), [recorded["token_ids"]])[0]
    expected = np.asarray(recorded["logits"])  # [num_tokens, n]: logits of recorded["ids"]
    difference = np.abs(np.take_along_axis(logits, np.asarray(recorded["ids"]), 1) - expected).max() / expected.max()
    if not difference <= (allowed := allowed_difference("bfloat16", is_lossy=bool(config.rounds_weights_to))):
        raise ModelError(
            f"the native kernels' logits differ from the default model's by {difference:.2g} of the largest "
            f"({allowed} allowed): set model.kernels to torch"
        )


def probe_logits(runner: ModelRunner, token_ids: Sequence[Sequence[int]]) -> Array:
    """Returns the logits of one or two sequences of at most 40 tokens: [num_sequences, num_tokens, vocab_size].

    The sequences share batches, and a later forward computes the second half of each, so that positions, block tables,
    and keys read from the cache are all tested. `runner`: must have a cache of PROBE_BLOCKS.
    """
    half = len(token_ids[0]) // 2
    halves = []
    for start in (0, half):
        sequences = zip(token_ids, _BLOCK_TABLES, strict=False)
        rows = [SequenceRows(ids[start : start + half], start, table, half) for ids, table in sequences]
        logits = runner.forward(build_input_batch(rows, PROBE_BLOCKS[1]))
        halves.append(logits.reshape(len(rows), half, -1))
    return namespace(halves[0]).concat(halves, axis=1)
