"""Checks that the experts of a model can be divided among ranks, and says which of them this process has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from outrider.engine.divided_experts import ExpertDivision, divided_layers
from outrider.engine.experts import are_experts
from outrider.engine.model_spec import ModelSpec
from outrider.engine.runnable_model import RunnableModel
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.support import NUMBERS_OF_EXPERTS
from outrider.model_hub.tensor_parallel import check_division, device_of_rank

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_expert_parallel(config: ModelConfig, model: PretrainedConfig) -> None:
    """Raises ConfigError if `expert_parallel_size` does not fit the other settings, the model or the machine."""
    text = model.get_text_config(decoder=True)
    num_experts = max(getattr(text, each, None) or 0 for each in NUMBERS_OF_EXPERTS)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    refusals = [
        (num_experts < config.expert_parallel_size, f"is more than the {num_experts} experts of {text.model_type}"),
        (others, f"does not go with layers of type {', '.join(others)}"),
    ]
    on_gpus = [(not config.deterministic, "needs model.deterministic on a GPU")]
    check_division(config, "expert_parallel_size", refusals, on_gpus=on_gpus)


def own_division(config: ModelConfig) -> ExpertDivision | None:
    """Returns the ranks among which experts are divided; None: they are not. The process group must have been joined,
    which draft nodes never do.
    """
    num_ranks = config.expert_parallel_size
    if num_ranks == 1:
        return None
    rank = dist.get_rank()
    return ExpertDivision(rank, num_ranks, config.num_redundant_experts // num_ranks, device_of_rank(config, rank))


def check_divided(model: nn.Module, spec: ModelSpec, kernels: str) -> None:
    """Raises ConfigError if the loaded model has experts that are not divided, or windows. `kernels`: described."""
    name = f"model.expert_parallel_size: {spec.architecture}"
    if not any(divided_layers(model)) or any(map(are_experts, model.modules())):
        raise ConfigError(f"{name} has experts that our kernels do not compute ({kernels})")
    if spec.windows:
        raise ConfigError(f"{name} has layers with a sliding window")


def drop_output_layer(model: RunnableModel) -> None:
    """Frees the output layer, which only rank 0 needs."""
    assert model.model is not None
    model.model.set_output_embeddings(nn.Identity())
