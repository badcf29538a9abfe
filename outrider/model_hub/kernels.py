"""Chooses a model's kernels: native ones if machine, settings and architecture allow it, otherwise torch's."""

from __future__ import annotations

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.cpu_kernels.paths import AUTO, FUSED, TORCH, KernelChoice, choose_kernels
from outrider.engine.device import device_type, has_gpu_driver, needs_torch
from outrider.engine.gpu_kernels import why_no_triton
from outrider.engine.processor import usable_cpus, within_quota
from outrider.errors import ConfigError
from outrider.model_hub.config import ModelConfig
from outrider.progress import Progress, no_progress

TRITON = "triton"


def choose_model_kernels(config: ModelConfig, device: str, *, progress: Progress = no_progress) -> KernelChoice:
    """Returns the kernels that `model.kernels` selects. May compile them. Raises: ConfigError.

    If FUSED is returned, the architecture may still be unsuitable for fused kernels.
    """
    if config.tensor_parallel_size > 1:
        return fall_back_to_torch(config, f"model.tensor_parallel_size is {config.tensor_parallel_size}")
    if device_type(device) != "cpu":
        if config.kernels != AUTO:
            return fall_back_to_torch(config, f"the device is {device_type(device)}")
        reason = why_no_triton(device)
        return fall_back_to_torch(config, reason) if reason else KernelChoice(path=FUSED, library=None)
    if config.attention != AUTO:
        return fall_back_to_torch(config, f"model.attention is {config.attention}")
    return choose_kernels(config.kernels, progress=progress)


def choose_attention(config: ModelConfig, device: str) -> str:
    """Returns the attention backend to use. Raises: ConfigError if it contradicts `model.deterministic`."""
    if not config.deterministic:
        return config.attention
    if device_type(device) == "cpu":
        return config.attention  # `check_deterministic` ensures native kernels
    if config.attention not in (AUTO, TRITON):
        raise ConfigError(f"model.attention {config.attention} is not deterministic: set it to auto or triton")
    return TRITON


def check_deterministic(config: ModelConfig, device: str, kernels: KernelChoice) -> None:
    """Raises ConfigError if `model.deterministic` is set and cannot be guaranteed."""
    if not config.deterministic:
        return
    if device_type(device) == "cpu" and kernels.library is None:
        raise ConfigError(f"model.deterministic needs native kernels on a CPU: {kernels}")
    if device_type(device) != "cpu":
        choose_attention(config, device)
        if reason := why_no_triton(device):
            raise ConfigError(f"model.deterministic {reason}")


def fall_back_to_torch(config: ModelConfig, reason: str) -> KernelChoice:
    """Returns torch's kernels, chosen for `reason`. Raises: ConfigError with the reason if other kernels are set."""
    if config.kernels not in (AUTO, TORCH):
        raise ConfigError(f"model.kernels {config.kernels} is not available: {reason}; use auto or torch")
    return KernelChoice(path=TORCH, library=None, reason=reason)


def start_kernels(choice: KernelChoice, config: ModelConfig) -> CpuKernels:
    """Starts the chosen library with the configured number of threads, by default one per usable processor."""
    assert choice.library is not None, "torch's kernels need no start"
    return CpuKernels(KernelLibrary(choice.library), config.num_threads or len(within_quota(usable_cpus())))


def resolve_device(name: str) -> str:
    """Resolves a setting to torch's device name. Raises: ConfigError if the device is not available."""
    if name == "cpu" or (name == "auto" and not has_gpu_driver()):
        return "cpu"
    with needs_torch(f"model.device {name} on a machine with a GPU"):
        import torch
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device {name!r} is not a device: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device {name}: models are computed on CPUs and CUDA devices; use auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"model.device {name}: torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return str(device)
