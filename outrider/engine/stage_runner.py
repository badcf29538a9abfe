"""The runner of one stage of a pipeline: rows come from the previous stage and go to the next, by torch.distributed.

Never run on a GPU, where nccl would carry the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.engine.cpu_kernels.decoder import NativeStep
from outrider.engine.input_batch import InputBatch
from outrider.engine.module_steps import ModuleSteps
from outrider.engine.runnable_model import RunnableModel
from outrider.engine.runner_base import ModelRunner

if TYPE_CHECKING:
    from outrider.engine.arrays import Array


class StageRunner(ModelRunner):
    """A runner of `model.stage`. All ranks of the process group must call `forward` with the same batches in order.

    A stage may be one batch ahead of the next: its states are sent while it computes the next batch.
    """

    def __init__(self, model: RunnableModel, steps: NativeStep | ModuleSteps) -> None:
        """`steps`: computes the layers of the stage."""
        assert model.stage is not None
        self.attention_name, self.phases, self.can_be_traced = steps.attention_name, steps.phases, steps.can_be_traced
        self.is_asynchronous = steps.is_asynchronous
        self._stage = model.stage
        self._steps = steps
        self._vocab_size = model.spec.vocab_size
        self._sending: tuple[Any, Tensor] | None = None

    def forward(self, batch: InputBatch, *, on_layer_done: Callable[[int], None] | None = None) -> Array:
        """Implements ModelRunner.forward; in a stage other than the last, the result has no logits.

        `on_layer_done` is also called for the layers of earlier stages, once the last of them has computed its own.

        Raises: RuntimeError if another stage is gone or too slow.
        """
        stage, states = self._stage, None
        if not stage.is_first:
            states = torch.as_tensor(self._steps.empty_states(batch.num_rows))
            dist.recv(states, stage.index)  # from the rank of the stage before
            if on_layer_done is not None:
                for layer in range(stage.layers.start):
                    on_layer_done(layer)
        result = self._steps.forward(batch, on_layer_done=on_layer_done, states=states)
        if stage.is_last:
            return result
        if self._sending is not None:
            self._sending[0].wait()
        sent = torch.as_tensor(result).contiguous()
        self._sending = dist.isend(sent, (stage.index + 2) % stage.num_stages), sent
        return np.empty((0, self._vocab_size), dtype=np.float32)
