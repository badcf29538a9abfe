"""The interface of forward passes over ragged batches of rows and our paged KV cache. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.engine.input_batch import InputBatch
from outrider.engine.step_clock import ForwardPhases
from outrider.errors import InternalError

if TYPE_CHECKING:
    from outrider.engine.arrays import Array
    from outrider.engine.rotation import Turn
    from outrider.engine.step_graphs import Capturable


class RankLoad(NamedTuple):
    """How the work is divided among ranks that divide sequences and experts."""

    rows_by_rank: tuple[int, ...]  # numbers of rows of the ranks' sequences since the start
    num_expert_copies: int = 0  # number of experts, of all layers, that have a second copy
    expert_balance: float = 0.0  # rows of the busiest rank's experts by the mean of ranks; 0: not measured yet


class ModelRunner(Protocol):
    """The forward pass of a model over one cache. Not thread-safe: the engine thread owns it. Implementations inherit
    the defaults here.
    """

    attention_name: str  # name of the attention backend, or "native"
    padded_rows: tuple[int, ...] = ()  # row counts to which steps are padded, ascending; larger steps are not padded
    phases: ForwardPhases = ForwardPhases()
    can_be_traced: bool = False  # whether torch computes forwards, so that its profiler sees them
    rank_load: RankLoad | None = None  # None: ranks divide no sequences. Readable from any thread
    is_asynchronous: bool = False  # whether `forward` only queues work on a device; reading its results waits for it

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Writes the rows' KV into the cache and returns the logits of `batch.logits_rows`.

        Features are in the cache when `forward` returns, but not yet when `on_layer_done` reports the last layer.

        `on_layer_done(layer)` is called from this thread for each layer in order, once the layer's keys and values are
        in the cache, so that they can be pushed while later layers compute. A CUDA graph computes all layers in one
        launch, so all are reported once it is queued.

        Returns [num_logits, vocab_size] float32: a numpy array if native kernels compute the model or its layers,
        otherwise a tensor on the model's device. Callers must not modify it.
        """

    def prepare_ahead(self, batch: InputBatch) -> InputBatch:
        """Does the host's preparation of a batch for `forward`: returns it padded and planned, but not uploaded.

        The result's token ids may still be changed. Because of the padding, `forward` may return additional rows of
        logits after those of the batch.
        """
        return batch

    def compute_layers(self, batch: InputBatch, num_layers: int) -> None:
        """Writes the rows' keys and values of the first layers only. Not every runner can; see `can_be_moved`."""
        raise InternalError(f"{type(self).__name__} does not compute single layers")

    def turns(self, num_positions: int) -> Sequence[Turn | None]:
        """Returns by what each layer's keys are rotated at a position `num_positions` further; None if they are not
        rotated. Not every runner can; see `can_be_moved`.
        """
        raise InternalError(f"{type(self).__name__} does not know its keys' rotations")

    @property
    def capturable(self) -> Capturable | None:
        """A forward pass that other CUDA graphs may capture, or None."""
        return None

    def renew_copies(self, layer: int) -> None:
        """Does what `DividedExperts.renew_copies` does, in this one of the layers with divided experts, if there are
        any.
        """
        return

    def capture_graphs(self) -> None:
        """Captures padded steps as CUDA graphs. Call it after the first forwards and before any block is allocated."""
        return
