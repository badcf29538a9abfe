"""The interface of what computes forward passes over ragged batches of rows and our paged KV cache. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from outrider.engine.input_batch import InputBatch
from outrider.engine.step_clock import ForwardPhases

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.step_graphs import Capturable


class ModelRunner(Protocol):
    """The forward pass of one node. Not thread-safe: the engine thread owns it. Runners inherit the defaults here."""

    attention_name: str  # the backend's name, or "native"
    padded_rows: tuple[int, ...] = ()  # row counts to which steps are padded, rising; larger steps are not padded
    phases: ForwardPhases = ForwardPhases()
    can_be_traced: bool = False  # whether torch computes forwards: its profiler knows nothing of a native decoder
    is_asynchronous: bool = False  # whether `forward` only queues work on a device; reading its results waits for it

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Writes the rows' KV into the cache and returns the logits of `batch.logits_rows`.

        Features are in the cache when it returns, and not before the last layer has been reported.

        `on_layer_done(layer)` is called from this thread, layers rising, once the keys and values of that layer are in
        the cache, so that KV is pushed while later layers compute.

        Returns [num_logits, vocab_size] float32, with no rows when none need logits: an array of numpy where native
        kernels compute the model or its layers, else a tensor on its device, which nobody may change.
        """

    def lay_out(self, batch: InputBatch) -> InputBatch:
        """Returns the batch as far as the host can prepare it for `forward`: padded and planned, but not uploaded.

        Its token ids may still be set. Its logits may have more rows, after those of the batch.
        """
        return batch

    @property
    def capturable(self) -> Capturable | None:
        """What else CUDA graphs may capture; None: nothing."""
        return None

    def capture_graphs(self) -> None:
        """Captures the steps that are padded, after the first forwards and before any block is handed out."""
        return
