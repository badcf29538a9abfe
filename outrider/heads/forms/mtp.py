"""MTP: one more decoder layer of the target's own kind, which reads a token's embedding and the hidden state before it.

    state = final_norm(layer(projection([token_norm(embedding); hidden_norm(hidden)])));  logits = lm_head(state)

The hidden state is the target's behind its final norm, and for later tokens the head's own, behind its final norm as
well. The layer is transformers' of the target's model_type, so it may have experts; one with compressed keys and values
(MLA) is refused. So is all but the first of several: each has keys and values of its own.

Source: DeepSeek-V3 (arXiv 2412.19437), as transformers (MtpLayer) and SGLang compute it. Layouts: in the target's own
checkpoint, that of DeepSeek and GLM (`model.layers.L.*`) and of Qwen (`mtp.*`); speculators' (`mtp_layers.0.*`).
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.engine.attention.base import AttentionOptions
from outrider.engine.attention.transformers_hook import ATTENTION_NAME, STEP_ARGUMENT, register_attention
from outrider.engine.features import FeatureReduction
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import Attend, HeadModel, HeadRows, HeadSpec
from outrider.heads.checkpoint import Checkpoint, Target, check_fits, refuse
from outrider.heads.form import HeadForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "mtp"
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields that say how many such layers a checkpoint has."""

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own, which DeepSeek's checkpoints have as well."""

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FLOAT32 = "e_score_correction_bias"
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class _Layout(NamedTuple):
    """Names of tensors; what else begins with `layer` is the decoder layer's."""

    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


class _Attention(NamedTuple):
    """Hands the layer's calls to the head's cache. See `LayerAttention`.

    Raises: ConfigError for attention of another kind, when the head is warmed up.
    """

    function: Attend

    def attend(
        self, _layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, _extras: object
    ) -> Tensor:
        if key.shape != value.shape or options.sliding_window or options.softcap:
            raise ConfigError(
                f"an MTP layer has keys {tuple(key.shape[1:])}, values {tuple(value.shape[1:])}, window "
                f"{options.sliding_window}, soft cap {options.softcap}, which is not supported"
            )
        return self.function(0, query, key, value, options.scaling)


class _Network(nn.Module):
    """The modules of the head, on the device, with its weights."""

    def __init__(self, config: PretrainedConfig, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """`tensors`: by the names of this class, all of them. Raises: ModelError for too few or others."""
        from transformers import AutoModel  # takes seconds, which heads of other forms do not have

        super().__init__()
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME)  # type: ignore[no-untyped-call]
            norm, size, epsilon = type(model.norm), config.hidden_size, config.rms_norm_eps
            self.token_norm, self.hidden_norm, self.final_norm = (norm(size, eps=epsilon) for _ in range(3))
            self.projection = nn.Linear(2 * size, size, bias=False)
            self.layer = model.layers[0]
        try:
            self.load_state_dict(dict(tensors), assign=True)
        except RuntimeError as error:
            raise ModelError(f"of the MTP layer: {error}") from error
        with torch.device(device):
            self.rotation = type(model.rotary_emb)(config=config)
        self.requires_grad_(requires_grad=False).eval()

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, step: object) -> Tensor:
        """[num_rows, hidden_size] twice, [num_rows] → [num_rows, hidden_size]."""
        rows = self.projection(torch.cat([self.token_norm(embeddings), self.hidden_norm(hidden)], -1))[None]
        positions = positions[None]
        rows = self.layer(
            rows,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotation(rows, positions),
            **{STEP_ARGUMENT: step},
        )
        return self.final_norm(rows[0])  # type: ignore[no-any-return]


class MTPHead(HeadModel):
    """The head of one folder."""

    def __init__(
        self, spec: HeadSpec, reduction: FeatureReduction, network: _Network, embedding: Tensor, output: Tensor
    ) -> None:
        self.spec = spec
        self.reduction = reduction
        self._network = network
        self._embedding = embedding  # [vocab_size, hidden_size]
        self._output = output  # the same

    def forward(self, rows: HeadRows, attend: Attend) -> Tensor:
        found: Tensor = self._network(
            self._embedding[rows.token_ids], rows.features, rows.positions, _Attention(attend)
        )
        return found

    def logits(self, hidden: Tensor, depths: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self._output).float()


def _is_form_of(config: Mapping[str, Any]) -> bool:
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == NAME)
    return any((config.get("text_config") or config).get(name) for name in _COUNTS)


def _reduction(checkpoint: Checkpoint, target: Target) -> FeatureReduction:
    fields = _fields(checkpoint)
    check_fits(
        checkpoint.folder,
        hidden_size=(int(fields["hidden_size"]), target.hidden_size),
        vocab_size=(int(fields["vocab_size"]), target.vocab_size),
        num_hidden_layers=(int(fields["num_hidden_layers"]), target.num_layers),
    )
    return FeatureReduction(taps=(target.num_layers,), hidden_size=target.hidden_size, takes_final_norm=True)


def _open(checkpoint: Checkpoint, target: Target, device: torch.device, dtype: torch.dtype) -> MTPHead:
    reduction = _reduction(checkpoint, target)
    config = _layer_config(checkpoint)
    own = _own_tensors(checkpoint, target.num_layers)
    cast = {
        name: tensor.to(device, torch.float32 if name.endswith(_FLOAT32) else dtype) for name, tensor in own.items()
    }
    register_attention()
    network = _Network(config, cast, device)
    spec = HeadSpec(
        form=NAME,
        name=checkpoint.folder.name,
        fingerprint=_fingerprint(checkpoint, own),
        num_layers=1,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        width=target.hidden_size,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
    )
    return MTPHead(
        spec, reduction, network, target.embedding().to(device, dtype), target.output_layer().to(device, dtype)
    )


def _fields(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of the configuration that describes the layer."""
    config = checkpoint.config
    fields: Mapping[str, Any] = config.get("transformer_layer_config") or config.get("text_config") or config
    return fields


def _layer_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Of a decoder of nothing but this layer. Raises: ConfigError for what is not supported."""
    from transformers import AutoConfig

    folder, fields = checkpoint.folder, dict(_fields(checkpoint))
    for name in _COUNTS:
        if (checkpoint.config.get(name) or fields.get(name) or 1) != 1:
            raise refuse(folder, name, checkpoint.config.get(name) or fields[name], "1")
    for name in ("quantization_config", "kv_lora_rank"):
        if fields.get(name):
            raise refuse(folder, name, fields[name], "none: weights as they are, and plain keys and values")
    try:
        config = copy.deepcopy(AutoConfig.for_model(**fields))
    except (KeyError, ValueError) as error:
        raise refuse(folder, "model_type", fields.get("model_type"), "what transformers knows") from error
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise refuse(folder, "rope_parameters.rope_type", kind, "one that does not depend on the length")
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        if set(config.layer_types) == {"sliding_attention"}:
            raise refuse(folder, "layer_types", "sliding_attention", "full_attention")
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the head has experts even where the target's first layers do not
    return config


def _own_tensors(checkpoint: Checkpoint, num_layers: int) -> dict[str, Tensor]:
    """By the names of `_Network`. Raises: ModelError."""
    names = checkpoint.tensor_names
    if "speculators_model_type" in checkpoint.config:
        own = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        layout = _Layout("mtp_layers.0.", *(f"mtp_layers.0.{name}.weight" for name in own))
    elif any(name.startswith("mtp.") for name in names):
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        layout = _Layout("mtp.layers.0.", *(f"mtp.{name}.weight" for name in own))
    else:
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        prefix = f"model.layers.{num_layers}."
        layout = _Layout(prefix, *(f"{prefix}{name}.weight" for name in own))
    tensors = {field: checkpoint.tensor(name) for field, name in layout._asdict().items() if field != "layer"}
    tensors = {f"{field}.weight": tensor for field, tensor in tensors.items()}
    experts: dict[tuple[str, int], Tensor] = {}
    for name in names - set(layout[1:]):
        short = name.removeprefix(layout.layer)
        if short == name or short in _SHARED:
            continue
        if match := _EXPERT.fullmatch(short):
            experts[match[2], int(match[1])] = checkpoint.tensor(name)
        else:
            tensors[f"layer.{short}"] = checkpoint.tensor(name)
    return tensors | _joined(checkpoint, experts)


def _joined(checkpoint: Checkpoint, experts: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
    """Of all experts one tensor each, as transformers keeps them."""
    if not experts:
        return {}
    numbers = range(1 + max(number for _, number in experts))
    try:
        gate, up, down = (
            torch.stack([experts[name, number] for number in numbers]) for name in ("gate_proj", "up_proj", "down_proj")
        )
    except KeyError as error:
        raise ModelError(f"{checkpoint.folder} has no {error} of its MTP layer's {len(numbers)} experts") from error
    return {"layer.mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "layer.mlp.experts.down_proj": down}


def _fingerprint(checkpoint: Checkpoint, own: Mapping[str, Tensor]) -> str:
    """Of the configuration and the head's tensors: its files may be all of the target."""
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for name, tensor in sorted(own.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


FORM = HeadForm(name=NAME, is_form_of=_is_form_of, reduction=_reduction, open=_open)
