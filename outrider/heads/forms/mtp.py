"""MTP: one more decoder layer of the target's own kind, over a token's embedding and the previous hidden state.

    state = final_norm(layer(projection([token_norm(embedding); hidden_norm(hidden)])));  logits = lm_head(state)

For the first drafted token, the hidden state is the target's after the target's final norm; for later ones, the head's
own after the head's final norm. The layer is that of transformers for the target's model_type, so it may have experts.
A layer of latent attention (MLA) keeps latent vectors, like the target's. Several MTP layers are refused, because each
would need its own keys and values.

Source: DeepSeek-V3 (arXiv 2412.19437), as computed by transformers (MtpLayer) and SGLang. Layouts: DeepSeek and GLM
(`model.layers.L.*`) and Qwen (`mtp.*`), in the target's own checkpoint; speculators (`mtp_layers.0.*`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.transformers_hook import (
    ATTENTION_NAME,
    STEP_ARGUMENT,
    LayerAttention,
    register_attention,
)
from outrider.engine.latent_attention import TorchProjections, absorb_projections, latent_layers, latent_shape
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import Attend, HeadModel, HeadRows
from outrider.heads.head_files import HeadFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields that hold the number of a checkpoint's MTP layers."""

_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
"""Endings of tensor names. Such tensors are copies of the target's, as in DeepSeek's checkpoints."""

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PARTS = ("token_norm", "hidden_norm", "projection", "final_norm")  # parts of `_Network` except the decoder layer
_FLOAT32 = "e_score_correction_bias"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def _attention_by(attend: Attend) -> LayerAttention:
    """Returns the layer's attention, which calls `attend`.

    The returned function raises ConfigError for unsupported attention, so the warm-up of the head fails.
    """

    def layer_attention(
        _layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, _extras: object
    ) -> Tensor:
        is_odd = key.shape != value.shape and not options.latent_dim
        if is_odd or options.sliding_window or options.softcap or options.sinks is not None:
            raise ConfigError(
                f"an MTP layer has keys {tuple(key.shape[1:])}, values {tuple(value.shape[1:])}, window "
                f"{options.sliding_window}, soft cap {options.softcap}, {'no ' * (options.sinks is None)}sinks, "
                "which is not supported"
            )
        return attend(0, query, key, value, options.scaling)

    return layer_attention


class _Network(nn.Module):
    """The modules of the head, with their weights on the device."""

    def __init__(self, config: PretrainedConfig, files: HeadFiles) -> None:
        """Raises: ModelError for missing tensors."""
        from transformers import AutoModel  # takes seconds, which heads of other forms must not spend

        super().__init__()
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME)  # type: ignore[no-untyped-call]
            norm, size, epsilon = type(model.norm), config.hidden_size, config.rms_norm_eps
            self.token_norm, self.hidden_norm, self.final_norm = (norm(size, eps=epsilon) for _ in range(3))
            self.projection = nn.Linear(2 * size, size, bias=False)
            self.layer = model.layers[0]
        try:
            self.load_state_dict(_own_tensors(files, self.state_dict().keys()), assign=True)
        except RuntimeError as error:
            raise ModelError(f"the MTP layer of {files.folder} cannot be loaded: {error}") from error
        with torch.device(files.device):
            self.rotation = type(model.rotary_emb)(config=config)
        absorb_projections(self.layer, TorchProjections)
        self.requires_grad_(requires_grad=False).eval()

    def angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of positions [1, num_rows]. Some models have positions on three axes."""
        has_axes = hasattr(self.rotation, "mrope_section")
        return self.rotation(states, positions.expand(3, 1, -1) if has_axes else positions)  # type: ignore[no-any-return]


class MTP(HeadModel):
    """An MTP head."""

    form = "mtp"

    @classmethod
    def is_form_of(cls, config: Mapping[str, Any]) -> bool:
        return any((config.get("text_config") or config).get(name) for name in _COUNTS)

    def __init__(self, files: HeadFiles) -> None:
        fields, target = _fields(files), files.target
        files.check_fits(
            hidden_size=(int(fields["hidden_size"]), target.hidden_size),
            vocab_size=(int(fields["vocab_size"]), target.vocab_size),
            num_hidden_layers=(int(fields["num_hidden_layers"]), target.num_layers),
        )
        self.reduction = target.last_hidden_state()

    def load(self, files: HeadFiles) -> None:
        config, width = _layer_config(files), files.target.hidden_size
        register_attention()
        self._network = _Network(config, files)
        self._embedding = files.target_embedding(width)
        self._output = files.target_output(width)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        plain = config.num_key_value_heads, head_dim, 0
        num_kv_heads, head_dim, latent_dim = next(map(latent_shape, latent_layers(self._network)), plain)
        self.spec = files.spec(
            self.form,
            num_layers=1,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            latent_dim=latent_dim,
            width=width,
        )

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        network, positions = self._network, rows.positions[None]
        token, hidden = network.token_norm(self._embedding[rows.token_ids]), network.hidden_norm(rows.features)
        states = network.projection(torch.cat([token, hidden], -1))[None]
        states = network.layer(
            states,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=network.angles(states, positions),
            **{STEP_ARGUMENT: _attention_by(attend)},
        )
        return network.final_norm(states[0])  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return self._output(hidden).float()


def _fields(files: HeadFiles) -> Mapping[str, Any]:
    """Returns the part of the configuration that describes the layer."""
    config = files.config
    fields: Mapping[str, Any] = config.get("transformer_layer_config") or config.get("text_config") or config
    return fields


def _layer_config(files: HeadFiles) -> PretrainedConfig:
    """Returns the configuration of a decoder that has only this layer. Raises: ConfigError if it is not supported."""
    from transformers import AutoConfig

    fields = dict(_fields(files))
    for name in _COUNTS:
        if (files.config.get(name) or fields.get(name) or 1) != 1:
            raise files.refusal(name, files.config.get(name) or fields[name], "1")
    if fields.get("quantization_config"):
        raise files.refusal("quantization_config", fields["quantization_config"], "none (unquantised weights)")
    try:
        config = copy.deepcopy(AutoConfig.for_model(**fields))
    except (KeyError, ValueError) as error:
        raise files.refusal("model_type", fields.get("model_type"), "a model type that transformers knows") from error
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise files.refusal("rope_parameters.rope_type", kind, "one that does not depend on the length")
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        if set(config.layer_types) == {"sliding_attention"}:
            raise files.refusal("layer_types", "sliding_attention", "full_attention")
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the head has experts even if the target's first layers have none
    return config


def _own_tensors(files: HeadFiles, known: AbstractSet[str]) -> dict[str, Tensor]:
    """Takes the tensors of `_Network`, whose names are `known`, and leaves unknown ones. Raises: ModelError."""
    num_layers = files.target.num_layers
    # Prefixes of the names of all the head's tensors, of the decoder layer's tensors, and of the other parts' tensors.
    if "speculators_model_type" in files.config:
        family, layer, prefix = "", "mtp_layers.0.", "mtp_layers.0."
        own = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    elif any(name.startswith("mtp.") for name in files.names):
        family, layer, prefix = "mtp.", "mtp.layers.0.", "mtp."
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        family, layer, prefix = "model.layers.", f"model.layers.{num_layers}.", f"model.layers.{num_layers}."
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    names = [f"{prefix}{name}.weight" for name in own]
    tensors = {f"{part}.weight": files.take(name) for part, name in zip(_PARTS, names, strict=True)}
    experts: dict[tuple[str, int], Tensor] = {}
    for name in sorted(files.names - set(names)):
        short = name.removeprefix(layer)
        if name.endswith(_SHARED) or not name.startswith(family) or _is_of_layer_before(name, num_layers):
            files.drop(name)
        elif match := _EXPERT.fullmatch(short):
            experts[match[2], int(match[1])] = files.take(name)
        elif f"layer.{short}" in known:
            tensor = files.read(name)
            dtype = torch.float32 if name.endswith(_FLOAT32) else files.dtype
            tensors[f"layer.{short}"] = tensor.to(files.device, dtype)
    return tensors | _joined(files, experts)


def _is_of_layer_before(name: str, num_layers: int) -> bool:
    """Returns whether a tensor belongs to one of the target's own layers."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return number.isdecimal() and int(number) < num_layers


def _joined(files: HeadFiles, experts: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
    """Joins the tensors of all experts into the stacked tensors of transformers' module."""
    if not experts:
        return {}
    numbers = range(1 + max(number for _, number in experts))
    try:
        gate, up, down = (
            torch.stack([experts[name, number] for number in numbers]) for name in ("gate_proj", "up_proj", "down_proj")
        )
    except KeyError as error:
        raise ModelError(f"{files.folder} lacks {error} among the {len(numbers)} experts of its MTP layer") from error
    return {"layer.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "layer.mlp.experts.down_proj": down}
