"""Checks that the heads of a model can be divided among ranks, and joins the process group of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outrider.engine.device import device_type
from outrider.engine.model_spec import ModelSpec
from outrider.engine.processor import usable_cpus, within_quota
from outrider.errors import ConfigError, ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.kernels import fall_back_to_torch, resolve_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make ranks listen on loopback only, because all are processes of one machine."""


Refusal = tuple[object, str]
"""A condition under which a model is not divided, and what the message says after the setting."""


def check_division(
    config: ModelConfig, setting: str, refusals: Sequence[Refusal], *, on_gpus: Sequence[Refusal] = ()
) -> None:
    """Raises ConfigError for the first reason why ranks cannot divide the model as `setting` says.

    In this order, it refuses another setting that divides the model as well; for `refusals`; and, if ranks compute on
    GPUs, for `on_gpus` and for too few GPUs.
    """
    other, device = config.parallel_setting, torch.device(resolve_device(config.device))
    reasons = [(other != setting, f"does not go with model.{other} {getattr(config, other)}"), *refusals]
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        too_few = f"needs the first {config.num_ranks} CUDA devices: torch sees {num_gpus}"
        reasons += [*on_gpus, (device.index or num_gpus < config.num_ranks, too_few)]
    for is_refused, why in reasons:
        if is_refused:
            raise ConfigError(f"model.{setting} {getattr(config, setting)} {why}")


def check_tensor_parallel(config: ModelConfig, model: PretrainedConfig) -> None:
    """Raises ConfigError if `tensor_parallel_size` does not fit the other settings, the model or the machine."""
    num_ranks = config.tensor_parallel_size
    fall_back_to_torch(config, f"model.tensor_parallel_size {num_ranks} computes with torch's kernels")
    text = model.get_text_config(decoder=True)
    kind, num_heads = text.model_type, getattr(text, "num_attention_heads", 0)
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    names = "base_model_tp_plan", "kv_lora_rank", "linear_num_value_heads"
    plan, latent, linear = (getattr(text, name, None) for name in names)
    device = device_type(resolve_device(config.device))
    accelerator = (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    refusals = [
        (config.weights != "auto", f"does not go with model.weights {config.weights}, which needs native kernels"),
        (config.deterministic, "does not go with model.deterministic: sums over ranks are made by the collectives"),
        (not plan, f"does not fit: transformers has no tensor-parallel plan for {kind}"),
        (latent, f"does not fit: all heads of latent attention ({kind}) share what is stored"),
        (linear, f"does not fit: layers with linear attention ({kind}) are not divided"),
        (num_heads % num_ranks, f"does not divide the model's {num_heads} attention heads"),
        (num_kv_heads % num_ranks, f"does not divide the model's {num_kv_heads} KV heads"),
        (accelerator != device, f"does not fit: transformers would split the model over {accelerator}, not {device}"),
    ]
    check_division(config, "tensor_parallel_size", refusals)


def join(config: ModelConfig, rank: int, store: Path, *, timeout_seconds: float) -> None:
    """Makes this process a rank: sets torch's threads and device, and joins the process group together with the others.

    `store`: a file that no group has used. Raises: ConfigError if the others do not join in time.
    """
    num_ranks = config.num_ranks
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    os.environ["LOCAL_RANK"] = str(rank)  # transformers derives the device from it
    torch.set_num_threads(config.num_threads or max(len(within_quota(usable_cpus())) // num_ranks, 1))
    device = device_of_rank(config, rank)
    is_cuda = device_type(device) == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(str(store), num_ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device(device) if is_cuda else None,
        )
    except RuntimeError as error:
        raise ConfigError(f"the {num_ranks} ranks of the model cannot reach each other: {error}") from error


def device_of_rank(config: ModelConfig, rank: int) -> str:
    """Returns a rank's device: a GPU of its own, or the CPU, which all ranks share."""
    device = resolve_device(config.device)
    return f"cuda:{rank}" if device_type(device) == "cuda" else device


def set_collective_timeout(model: PreTrainedModel, *, timeout_seconds: float) -> None:
    """Sets the timeout of a loaded model's collectives, so that a hanging rank becomes an error. While models are
    loaded, it may be longer; with tensor parallelism it is torch's default then, half an hour.
    """
    mesh: Any = model._device_mesh  # noqa: SLF001 available nowhere else in transformers; None: not its plan
    group = dist.group.WORLD if mesh is None else mesh.get_group("tp")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)  # noqa: SLF001 only this


def check_split(spec: ModelSpec, config: PretrainedConfig, num_ranks: int) -> None:
    """Raises ModelError if transformers does not divide keys and values: each rank would then store all of them."""
    text = config.get_text_config(decoder=True)
    whole = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if spec.num_kv_heads * num_ranks != whole:
        raise ModelError(
            f"{spec.architecture}: transformers' tensor-parallel plan leaves {spec.num_kv_heads} of {whole} KV heads "
            f"on each of {num_ranks} ranks: set model.tensor_parallel_size to 1"
        )
