"""The interface of a loaded model, as runners see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.model_spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.cpu_kernels.modules import NativeLayers


class RunnableModel(Protocol):
    """What a runner needs of a loaded model (see outrider.model_hub.loaded_model.LoadedModel)."""

    @property
    def model(self) -> PreTrainedModel | None:
        """None where `native` is a NativeDecoder."""

    @property
    def device(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def native(self) -> NativeDecoder | NativeLayers | None:
        """What computes in place of `model`, or in its layers."""

    @property
    def cpu_kernels(self) -> CpuKernels | None:
        """Of `native`."""
