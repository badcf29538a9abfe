"""Native layers with linear attention by the gated delta rule (see outrider.engine.linear_attention)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.cpu_kernels.interface import address_of, structures
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import Workspace
from outrider.engine.cpu_kernels.operators import delta_rule
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.array_plane import Words
from outrider.engine.kv_cache.state_table import StateSteps
from outrider.engine.linear import MakeLinear
from outrider.engine.linear_attention import LinearStep, projections_of, sizes_of

_NO_STATES = StateSteps(0, -1)


class NativeDeltaRule(nn.Module):
    """Takes the place of a model's layer with linear attention."""

    def __init__(self, kernels: CpuKernels, workspace: Workspace, module: Any, make_linear: MakeLinear) -> None:
        """`module`: transformers' layer, see `delta_layers`."""
        super().__init__()
        self._kernels, self._workspace = kernels, workspace
        self._index = module.layer_idx
        rows, gates, output = projections_of(module)
        self._rows, self._gates = make_linear(torch.cat([*rows]), None), make_linear(gates, None)
        self._output = make_linear(output, None)
        norm = module.norm if hasattr(module, "norm") else module.o_norm
        convolution = module.conv1d.weight.squeeze(1).T  # [kernel_size, channels]
        values = convolution, -module.A_log.float().exp(), module.dt_bias, norm.weight
        self._arrays = [each.detach().float().contiguous().numpy() for each in values]
        self._struct = structures.OutriderDeltaRule(
            *sizes_of(module), len(convolution), *map(address_of, self._arrays), norm.variance_epsilon,
            2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, *, outrider_step: LinearStep, **_others: Any) -> Tensor:
        """Maps [1, num_rows, hidden_size] to the same shape. `outrider_step`: the STEP_ARGUMENT of the forward."""
        rows, gates = self._rows(hidden_states)[0], self._gates(hidden_states)[0]
        output: Tensor = self._output(outrider_step.apply_delta_rule(self._index, self, rows, gates))
        return output.unsqueeze(0)

    def compute(self, batch: Any, steps: StepStates, rows: Tensor, states: Words, gates: Tensor) -> Tensor:
        """Advances the states by a step, and returns its outputs in the shape of `gates`.

        Args:
            batch: the step, as NativeAttention.prepare returns it for the layers' group.
            steps: which states the step reads and writes.
            rows: the layer's stored rows, [num_slots, row_width], which have the step's own.
            states: the layer's stored states, [num_states, num_heads, state_size] float32.
            gates: [num_rows, num_heads * value_dim].
        """
        output = torch.empty_like(gates)
        delta_rule(self._kernels, self._workspace, self._struct, batch, steps.struct, rows, states, gates, output)
        return output


class StepStates:
    """The states of a batch's sequences in the kernel's format, and the memory that it points to."""

    def __init__(self, batch: InputBatch) -> None:
        sequences: Sequence[StateSteps] = [each or _NO_STATES for each in batch.states] or [_NO_STATES] * batch.num_seqs
        positions, slots = ([each[field] for each in sequences] for field in range(2))
        ends = accumulate(len(each.stores) for each in sequences)
        stores = chain.from_iterable(chain.from_iterable(each.stores for each in sequences))
        self._arrays = [np.array([*values], dtype=np.int64) for values in (positions, slots, (0, *ends), stores)]
        self.struct = structures.OutriderStateSteps(*map(address_of, self._arrays))
