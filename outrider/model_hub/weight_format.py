"""The format of a model's weights while it computes, and its names for users, peers and numerics. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.cpu_kernels.paths import KernelChoice
from outrider.errors import ConfigError
from outrider.model_hub.checkpoint import Checkpoint
from outrider.model_hub.config import DEQUANTIZED, ModelConfig

_LOSSY_NOTES = {
    "int8": "lossy int8 weights and activations",
    "int4": "lossy int4 weights, int8 activations",
}
_LOSSY_TYPES = {"int8": "W8A8", "int4": "W4A8"}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of products are stored, and whether activations are quantised for them.

    Weights of fewer bits than the dtype come from the checkpoint or are rounded at load. Either way the rows that they
    multiply are quantised to int8, in native kernels only.
    """

    name: str  # for users: "bfloat16", "int8, rounded at load" or "GGUF Q5_0, Q4_K"
    rounded_to: str = ""  # "int8" or "int4": what plain weights are rounded to at load; "": they are not rounded
    has_int8_activations: bool = False
    is_dequantised: bool = False  # whether a quantised checkpoint is converted to the dtype

    @property
    def arithmetic(self) -> str:
        """The part of the fingerprint's arithmetic that the format adds, such as "W4A8"; may be empty.

        It also tells our reading of quantised checkpoints from that of transformers' quantizers.
        """
        own = "A8" if self.has_int8_activations else "dequantised" * self.is_dequantised
        return _LOSSY_TYPES.get(self.rounded_to, own)

    @property
    def numerics_note(self) -> str:
        """The part of the numerics that the format adds; may be empty."""
        return _LOSSY_NOTES.get(self.rounded_to, "int8 activations" if self.has_int8_activations else "")


def choose_weight_format(
    config: ModelConfig, checkpoint: Checkpoint | None, kernels: KernelChoice, *, dtype: str, is_decoder: bool
) -> WeightFormat:
    """Returns the format that `model.weights` selects for a checkpoint.

    `checkpoint`: None for a plain one that transformers reads. `is_decoder`: whether the native decoder computes the
    whole model.

    Raises: ConfigError if the setting does not fit the checkpoint or the kernels.
    """
    if config.rounds_weights_to:
        if checkpoint is not None and checkpoint.is_quantised:
            raise ConfigError(
                f"model.weights {config.weights}: the checkpoint is quantised already ({checkpoint.format}); set "
                f"model.weights to auto or {DEQUANTIZED}"
            )
        if kernels.library is None:
            raise ConfigError(
                f"model.weights {config.weights} needs native kernels: {kernels}; set model.weights to auto"
            )
        return WeightFormat(f"{config.weights}, rounded at load", config.rounds_weights_to, has_int8_activations=True)
    if checkpoint is None:
        return WeightFormat(dtype)
    if checkpoint.is_quantised and is_decoder and config.weights != DEQUANTIZED:
        return WeightFormat(checkpoint.format, has_int8_activations=True)
    return WeightFormat(f"{checkpoint.format}, in {dtype}", is_dequantised=not checkpoint.is_plain)
