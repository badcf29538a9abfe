"""Checks at load that a decoder can be served, by running it.

Each layer must store plain keys and values for each token, or a latent vector, and use transformers'
AttentionInterface only for causal attention with a scale, a window, a soft cap and sinks; or it must have linear
attention by the gated delta rule. Other models are refused with an error that names them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from outrider.engine.attention import make_attention_backend
from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, STEP_ARGUMENT, LayerAttention
from outrider.engine.device import device_type
from outrider.engine.input_batch import SequenceRows, build_input_batch
from outrider.engine.kv_cache.planes import STATE_INTERVAL
from outrider.engine.kv_cache.state_table import StateSteps
from outrider.engine.latent_attention import latent_layers, latent_shape
from outrider.engine.linear_attention import describe_linear
from outrider.engine.model_runner import make_runner
from outrider.engine.model_spec import ModelSpec, windows_of
from outrider.engine.numerics import allowed_difference
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import ModelError
from outrider.model_hub.default_packing import PROBE_BLOCKS, probe_logits
from outrider.model_hub.quantised.methods import gpu_package, method_of, quantization_of, why_not_readable
from outrider.model_hub.quantised.scheme import ADVICE
from outrider.model_hub.window import Window

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_OF_DELTA_RULE = "linear_num_value_heads"
"""A field of configurations whose layers of type linear_attention are gated delta rules."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MEAN_TOLERANCE = 0.3
"""Bound on the mean difference of all rows, as a fraction of the bound on one row. It detects faults that change
every row, but by less than the bound on one row."""
_OWN_MULTIPLE, _OWN_MARGIN = 3.0, 0.1
"""Bound on our logits' mean difference from float32 for a model that amplifies rounding: this multiple of the mean
difference of transformers' own logits, plus this fraction of the bound on one row. It is a multiple because, of two
correct paths, one may choose other experts for twice as many rows."""
_UNRELATED_FRACTION = 0.5
"""Bound on the mean difference, as a fraction of the mean difference between unrelated logits."""
_PROBE_TOKENS = 40
"""Number of tokens of each probed sequence: several blocks per half. At far positions only rotations are compared."""
SPLIT_CONTEXT = 1200
"""Number of tokens with which our GPU kernels split contexts and products in passes of few rows, but not of many."""
_COMPARED_ROWS = 32
_ROWS_ALONE = 8
_COMPARED_BLOCK = 16
_COMPARED_CHUNK = 200
"""Number of rows per chunk, so few that our GPU kernels still split contexts and products."""


def check_config(config: PretrainedConfig, device: str) -> None:
    """Refuses models whose configuration makes them unsuitable. Raises: ModelError that names the architecture.

    On a CPU we read quantized weights ourselves. On a GPU they are left to transformers' quantizers, most of which need
    a package.
    """
    name = architecture_name(config)
    if quantization := quantization_of(config.to_dict()):
        if device_type(device) == "cpu":
            if why := why_not_readable(quantization):
                raise ModelError(f"{name}: {why}")
            text = config.get_text_config(decoder=True)
            if any(getattr(text, each, None) for each in NUMBERS_OF_EXPERTS):
                raise ModelError(f"{name} has quantized experts, which are not supported on a CPU: {ADVICE}")
        elif package := gpu_package(method := method_of(quantization)):
            raise ModelError(f"{name} is quantized ({method}), which needs a package on a GPU: pip install {package}")
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder: only decoders that continue a text can be served")
    text_config = config.get_text_config(decoder=True)
    unknown = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if hasattr(text_config, _OF_DELTA_RULE) and "linear_attention" in unknown:
        if device_type(device) != "cpu":
            raise ModelError(f"{name} has linear attention, which only CPUs compute: set model.device to cpu")
        unknown.remove("linear_attention")
    if unknown:
        raise ModelError(f"{name} has layers of type {', '.join(sorted(unknown))}, which keep no plain K and V")
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} has layers that share the K and V of others, which the paged cache does not support")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name} is not a causal language model that transformers knows")
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise ModelError(
            f"{name} cannot be served: it does not compute attention through transformers' AttentionInterface, which "
            "paged attention replaces"
        )


def describe_decoder(model: PreTrainedModel, *, dtype: str, window: Window) -> tuple[ModelSpec, list[AttentionOptions]]:
    """Describes the model by recording what each layer passes to attention in a forward of two tokens.

    Raises: ModelError if not all layers store plain K and V of one shape.
    """
    name = architecture_name(model.config)
    config = model.config.get_text_config(decoder=True)
    recorded: dict[int, tuple[tuple[int, int, int, int], AttentionOptions]] = {}
    latents = {layer.layer_idx: layer for layer in latent_layers(model)}
    if not all(type(layer.kv_b_proj) is nn.Linear and layer.kv_b_proj.bias is None for layer in latents.values()):
        raise ModelError(f"{name} has latent projections that are quantized or have a bias, which is not supported")
    token_ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    arguments: dict[str, Any] = {STEP_ARGUMENT: _recorder(name, recorded, latents)}
    try:
        with torch.inference_mode():
            logits = model(
                input_ids=token_ids,
                position_ids=torch.arange(2, device=model.device).unsqueeze(0),
                use_cache=False,
                **arguments,
            ).logits
    except ModelError:
        raise
    except Exception as error:  # architectures may raise anything
        raise ModelError(f"{name} cannot be served: {_why_not_paged(model, token_ids)}") from error
    linear = describe_linear(model)
    of_linear = () if linear is None else linear.layers
    if sorted((*recorded, *of_linear)) != list(range(config.num_hidden_layers)) or not recorded:
        raise ModelError(
            f"{name} has {config.num_hidden_layers} layers and attends in {len(recorded)}: each must keep plain "
            f"K and V for each token, which state-space and recurrent layers do not, or be a plain gated delta rule"
        )
    layers = [recorded[layer][1] for layer in sorted(recorded)]
    layer_types = getattr(config, "layer_types", None) or ()
    for layer, layer_type in enumerate(layer_types):
        if layer_type == "sliding_attention" and recorded[layer][1].sliding_window is None:
            raise ModelError(f"{name}: layer {layer} slides its window with its own mask, which is not supported")
    shapes = {shape for shape, _ in recorded.values()}
    if len(shapes) != 1:
        told = sorted(shape if shape[3] else shape[:3] for shape in shapes)
        raise ModelError(f"{name} has layers of different K and V shapes {told}, which is not supported")
    num_heads, num_kv_heads, head_dim, latent_dim = shapes.pop()
    windows = windows_of((layer.sliding_window for layer in layers), getattr(config, "max_position_embeddings", None))
    if windows and linear is not None:
        raise ModelError(f"{name} has both sliding windows and linear attention, which is not supported")
    spec = ModelSpec(
        architecture=name,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        vocab_size=logits.shape[-1],
        max_model_len=window.max_model_len,
        dtype=dtype,
        is_extended=window.is_extended,
        windows=windows,
        linear=linear,
    )
    return spec, layers


def _why_not_paged(model: PreTrainedModel, token_ids: Tensor) -> str:
    """Returns why a model that uses AttentionInterface does not run with ours. Tries the model's own forward."""
    try:
        own_logits(model, token_ids)
    except Exception as error:  # noqa: BLE001 architectures may raise anything
        return f"its own forward fails as well ({type(error).__name__}: {error}): its checkpoint is damaged or unusual"
    return "its layers do not pass a forward's arguments on to attention, through which paged attention finds the cache"


def check_paged_forward(
    model: RunnableModel, expected: Tensor, *, exact: Callable[[], Tensor], is_lossy: bool = False
) -> None:
    """Compares our forward with `expected`, the model's own logits of `probe_token_ids`.

    The allowed difference is larger if the weights were rounded (`is_lossy`). If the logits differ by more than that,
    the model may amplify rounding, for example by its choice of experts. Then `exact` is called, which returns logits
    in float32, and our logits may differ from these by little more than `expected` does.

    Raises: ModelError if the difference is larger than allowed.
    """
    spec = model.spec
    allowed = allowed_difference(spec.dtype, is_lossy=is_lossy)
    token_ids = probe_token_ids(spec.vocab_size)
    cache = model.make_cache(*PROBE_BLOCKS)
    runner = make_runner(model, cache, make_attention_backend("torch_sdpa", cache.device))
    paged = torch.as_tensor(probe_logits(runner, token_ids.tolist()))
    differences = _differences(paged, expected)
    if float(differences.max()) <= allowed and float(differences.mean()) <= _MEAN_TOLERANCE * allowed:
        return
    reference = expected if spec.dtype == "float32" else exact()
    own = float(_differences(expected, reference).mean())
    found = float(_differences(paged, reference).mean())
    unrelated = float(_differences(reference.roll(1, dims=1), reference).mean())  # each row against another one
    limit = min(_OWN_MULTIPLE * own + _OWN_MARGIN * allowed, _UNRELATED_FRACTION * unrelated)
    if not found <= limit:
        what, advice = "paged forward", "its attention may be one that cannot be served"
        if kernels := "native" * (model.native is not None) or "fused" * (model.fused is not None):
            what, advice = f"{kernels} kernels' forward", "set model.kernels to torch"
        raise ModelError(
            f"{spec.architecture}: the {what} differs from the model's own by {found:.2g} of the largest logit, the "
            f"mean of {differences.numel()} rows; {limit:.2g} is allowed, as transformers' {spec.dtype} differs from "
            f"its float32 by {own:.2g}: {advice}"
        )


def _differences(logits: Tensor, reference: Tensor) -> Tensor:
    """Returns the largest difference of each row, relative to the largest logit of all rows of the reference."""
    return (logits - reference).abs().amax(-1).flatten() / reference.abs().max().clamp_min(1e-6)


def depends_on_batch(model: RunnableModel, attention: str = "torch_sdpa", *, num_tokens: int = 64) -> bool:
    """Returns whether the bits of some rows' logits depend on the batch, tested on random tokens at load.

    The last rows of a sequence are computed in four ways: in one pass with all earlier rows, one by one, together with
    other sequences (one of them at the end of the window), and as a path of a draft tree. With SPLIT_CONTEXT tokens,
    kernels that split long contexts or wide products do so in some of these passes and not in others. Equal bits prove
    nothing about other batches; unequal bits prove that the model depends on the other rows.
    """
    spec = model.spec
    num_tokens = min(num_tokens, spec.max_model_len)
    num_compared = min(_COMPARED_ROWS, num_tokens // 2)
    start = num_tokens - num_compared
    generator = torch.Generator().manual_seed(2)
    ids, others = torch.randint(0, spec.vocab_size, (2, num_tokens), generator=generator).tolist()
    num_blocks = -(-num_tokens // _COMPARED_BLOCK)
    cache = model.make_cache(3 * num_blocks, _COMPARED_BLOCK, state_slots=1)
    in_one_pass, in_chunks, of_others = (range(first * num_blocks, (first + 1) * num_blocks) for first in range(3))
    runner = make_runner(
        model, cache, make_attention_backend(attention, cache.device, spec.dtype, **spec.attention_shape)
    )

    def logits(first: SequenceRows, *company: SequenceRows) -> Tensor:
        """Returns the first sequence's logits: [num_logits, vocab_size] float32."""
        rows = [first, *company]
        if spec.linear is not None:  # computing all tokens before a far one would take too long
            starts = [each.start_position if each.start_position > num_tokens else 0 for each in rows]
            states = [StateSteps(start // STATE_INTERVAL * STATE_INTERVAL, 0) for start in starts]
            rows = [each._replace(states=own) for each, own in zip(rows, states, strict=True)]
        found = runner.forward(build_input_batch(rows, cache.block_size))
        return torch.as_tensor(found)[: first.num_logits].clone()

    expected = logits(SequenceRows(ids, 0, in_one_pass, num_compared))
    for chunk in range(0, start, _COMPARED_CHUNK):
        end = min(chunk + _COMPARED_CHUNK, start)
        logits(SequenceRows(ids[chunk:end], chunk, in_chunks, 1))
    few = range(start, start + min(_ROWS_ALONE, num_compared // 2))
    alone = torch.cat([logits(SequenceRows(ids[at : at + 1], at, in_chunks, 1)) for at in few])
    together = logits(
        SequenceRows(ids[start:], start, in_chunks, num_compared),
        SequenceRows(others[: 2 * _COMPARED_ROWS], 0, of_others, 1),
        SequenceRows(ids[:1], 0, of_others[-1:], 1),
        SequenceRows(ids[:1], spec.max_model_len - 1, [of_others[0]] * -(-spec.max_model_len // _COMPARED_BLOCK), 1),
    )
    # Each token on the path has a sibling before it: [known, sibling, token, sibling, token, …].
    tree = [ids[start], *(token for at in few[1:] for token in (others[at], ids[at]))]
    parents = [2 * (draft // 2) - 1 for draft in range(len(tree) - 1)]
    in_tree = logits(SequenceRows(tree, start, in_chunks, len(tree), parents))[::2]
    return not all(torch.equal(found, expected[: len(found)]) for found in (alone, together, in_tree))


def architecture_name(config: PretrainedConfig) -> str:
    """Returns the class that a checkpoint names or, if it names none, its model type."""
    architectures = getattr(config, "architectures", None)
    return str(architectures[0]) if architectures else str(config.model_type)


def _recorder(
    name: str, layers: dict[int, tuple[tuple[int, int, int, int], AttentionOptions]], latents: Mapping[int, Any]
) -> LayerAttention:
    """Makes an attention function that computes nothing and records in `layers` each layer's shape and options.

    The function returns zeros, and raises ModelError if a layer cannot be served. `name`: the architecture's name.
    `latents`: the modules of latent attention by layer, which still expand keys and values. The shape is (query heads,
    KV heads, head_dim, latent_dim) as ModelSpec has them.
    """

    def record(
        layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, extras: Mapping[str, Any]
    ) -> Tensor:
        latent = latents.get(layer)
        if latent is None and (key.shape != value.shape or key.shape[-1] != query.shape[-1]):
            raise ModelError(f"{name} has K of {key.shape[-1]} and V of {value.shape[-1]} dimensions a head")
        unknown = [
            extra for extra, held in extras.items() if isinstance(held, Tensor) and extra not in _HARMLESS_TENSORS
        ]
        if unknown or extras.get("is_causal") is False:
            raise ModelError(f"{name} asks attention for {', '.join(unknown) or 'two directions'}: not supported")
        if options.sinks is not None and options.sinks.shape != (query.shape[1],):
            raise ModelError(f"{name} has attention sinks {[*options.sinks.shape]} for {query.shape[1]} query heads")
        if layer in layers:
            raise ModelError(f"{name} attends twice in layer {layer}: not supported")
        stored = (key.shape[1], key.shape[2], 0) if latent is None else latent_shape(latent)
        layers[layer] = ((query.shape[1], *stored), options)
        return value.new_zeros((*query.shape[:2], value.shape[-1]))

    return record


_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "input_ids"})


def probe_token_ids(vocab_size: int) -> Tensor:
    """Returns random ids for two sequences: [2, _PROBE_TOKENS] int64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (2, _PROBE_TOKENS), generator=generator)


def own_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Runs the model's own forward, with transformers' eager attention.

    `token_ids`: [num_sequences, num_tokens] int64. Returns [num_sequences, num_tokens, vocab_size] float32.
    """
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=token_ids.to(model.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits.float()
