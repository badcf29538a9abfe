"""Forward passes of a head in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.arrays import Array, ids_like
from outrider.engine.attention import AttentionOptions, make_attention_backend
from outrider.engine.attention.base import AttentionBackend
from outrider.engine.attention.native import NativeAttention
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.graph_shapes import GraphShapes
from outrider.engine.input_batch import InputBatch
from outrider.engine.kv_cache.paged_cache import PagedKVCache
from outrider.engine.kv_cache.tensor_planes import TORCH_DTYPES, tensor_of
from outrider.engine.module_steps import PagedStep
from outrider.engine.step_graphs import StepGraphs, cuda_graphs
from outrider.heads.base import HeadModel, HeadRows

MAX_GRAPH_ROWS = 64
"""Maximum number of rows of a forward that is captured as a CUDA graph. Its logits take 33 MB with 128,256 ids."""


class ModuleHeadSteps:
    """Computes the forwards of one head over the head's own cache. Logits are numpy arrays on a CPU, else tensors."""

    def __init__(
        self, model: HeadModel, kv_cache: PagedKVCache | None, *, device: str, kernels: CpuKernels | None
    ) -> None:
        """`kv_cache`: None if the head keeps no KV. `kernels`: compute attention; None: the device's backend does."""
        self.parallel_feature = model.parallel_feature
        self._model = model
        self._kv_cache = kv_cache
        self._device, self.dtype = torch.device(device), TORCH_DTYPES[model.spec.dtype]
        self._graphs: StepGraphs | None = None
        self._attention: AttentionBackend
        if kernels is not None:
            self._attention = NativeAttention(kernels)
        else:
            spec = model.spec
            shape = {"num_heads": max(spec.num_heads, 1), "num_kv_heads": max(spec.num_kv_heads, 1)}
            self._attention = make_attention_backend("auto", device, spec.dtype, **shape, latent_dim=spec.latent_dim)

    @property
    def can_be_captured(self) -> bool:
        """Whether a graph can capture `compute`: it reads no host values that differ between batches of one shape."""
        return self._kv_cache is not None and self._attention.can_be_captured and self._model.spec.num_parallel == 1

    def capture_graphs(self) -> None:
        """Captures forwards of up to MAX_GRAPH_ROWS rows as CUDA graphs. Call it before any block is allocated."""
        assert self._kv_cache is not None
        self._states = torch.zeros((MAX_GRAPH_ROWS, self._model.spec.width), dtype=self.dtype, device=self._device)
        self._depths = torch.zeros(MAX_GRAPH_ROWS, dtype=torch.int64, device=self._device)
        self._graphs = StepGraphs(
            GraphShapes(MAX_GRAPH_ROWS),
            device=self._device,
            scratch_blocks=self._kv_cache.scratch_blocks,
            block_size=self._kv_cache.block_size,
            capture=cuda_graphs(self._device),
            plan=self._attention.plan,
        )
        self._graphs.capture_all(self._compute_in_place)

    def _compute_in_place(self, batch: InputBatch) -> Tensor:
        """Computes a padded batch's logits, for capture. Replaces features in `_states` by the head's own states."""
        states = self._states[: batch.num_rows]
        hidden, logits = self.compute(batch, states, self._depths[: batch.num_rows], batch)
        states.copy_(hidden)
        return logits

    def plan(self, batch: InputBatch) -> InputBatch:
        """Plans attention as AttentionBackend.plan does."""
        return self._attention.plan(batch)

    @property
    def target_ids(self) -> Array | None:
        """[draft_vocab_size]: the target's token id of each logit; None if head and target have the same ids."""
        return None if self._model.target_ids is None else self._as_logits_are(self._model.target_ids)

    def rows(self, values: Array) -> Tensor:
        """Returns features on the head's device and in its dtype."""
        tensor = tensor_of(values)
        # `to` releases the interpreter's lock even if nothing changes, and then waits for it (see PlaneFeatures.read).
        is_fit = tensor.dtype == self.dtype and tensor.device == self._device
        return tensor if is_fit else tensor.to(self._device, self.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: InputBatch, features: Tensor, depths: Sequence[int], attended: InputBatch
    ) -> tuple[Tensor, Array]:
        """Computes one forward of rows with `features` [num_rows, width] at `depths` [num_rows] (see HeadRows).

        `attended`: the same rows, with the positions and paths that attention uses; or `batch` if they are equal.

        Returns (the head's own hidden states [num_logits, width], logits over the target's vocabulary
        [num_logits, vocab_size] float32). Logits are -inf for ids that the head does not draft. Those of a head with
        `spec.is_chained` are over its own ids, for `logits_after`. The results of a captured forward are valid until
        the next forward.
        """
        at_depths = ids_like(depths, features)
        if self._graphs is not None and batch.num_rows <= MAX_GRAPH_ROWS:
            self._states[: batch.num_rows].copy_(features)
            self._depths[: batch.num_rows].copy_(at_depths)
            logits = self._graphs.run(batch)
            if logits is not None:
                return self._states[: batch.num_logits], logits
        hidden, logits = self.compute(batch, features, at_depths, attended)
        return hidden, self._as_logits_are(logits)

    @torch.inference_mode()
    def logits_after(self, logits: Array, hidden: Tensor, previous: Array) -> tuple[Array, Array | None]:
        """Corrects the logits of one token of each block by the tokens before it (see HeadModel.logits_after).

        `logits`, `hidden`: what `forward` returned. `previous`: [num_blocks, n] int64: the tokens before the blocks'
        first n tokens, of which the n-th is corrected. Returns its logits [num_blocks, vocab_size] float32, and the
        probabilities [num_blocks] float64 that the target accepts it; None if the head does not estimate them.
        """
        before = tensor_of(previous)
        of_blocks, states = (each.view(len(before), -1, each.shape[1]) for each in (tensor_of(logits), hidden))
        num = before.shape[1]
        corrected, confidence = self._model.logits_after(of_blocks[:, num - 1], states[:, :num], before)
        sure = None if confidence is None else torch.sigmoid(confidence.double()).nan_to_num(0.0)  # features may be NaN
        return self._as_logits_are(self._of_target(corrected)), None if sure is None else self._as_logits_are(sure)

    def compute(
        self, batch: InputBatch, features: Tensor, depths: Tensor, attended: InputBatch
    ) -> tuple[Tensor, Tensor]:
        """Computes `forward` with depths on the device. A graph can capture this if `can_be_captured` is true."""
        planned = attended if self._kv_cache is None else self._attention.plan(attended)
        fed = (planned if attended is batch else batch).on(self._device)
        over_cache = None if self._kv_cache is None else PagedStep(self._kv_cache, self._attention, planned)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            assert over_cache is not None, "a head without layers asks for attention"
            options = AttentionOptions(scaling, latent_dim=self._model.spec.latent_dim)
            return over_cache(layer, query, key, value, options, {})

        hidden = self._model.forward(HeadRows(fed.token_ids, features, depths, fed.positions), attend)
        hidden = hidden.index_select(0, fed.logits_rows)
        if not batch.num_logits:
            return hidden, hidden
        logits = self._model.logits(hidden, depths.index_select(0, fed.logits_rows))
        return hidden, logits if self._model.spec.is_chained else self._of_target(logits)

    def _of_target(self, logits: Tensor) -> Tensor:
        """Widens logits [n, draft_vocab_size] to [n, vocab_size], with -inf for ids that the head does not draft."""
        target_ids = self._model.target_ids
        if target_ids is None:
            return logits
        shape = (len(logits), self._model.spec.vocab_size)
        return torch.full(shape, -torch.inf, device=logits.device).index_copy_(1, target_ids, logits)

    def _as_logits_are(self, values: Tensor) -> Array:
        return values.numpy() if self._device.type == "cpu" else values
