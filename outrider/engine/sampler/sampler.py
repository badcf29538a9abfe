"""The sampler: takes rows of logits, returns chosen tokens and their logprobs.

A decision depends on its own row of logits, its sample's parameters, the seed, the sample and the position, and on the
tokens before it, never on the rest of the batch or on the origin of a draft. All arithmetic is row by row, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.constraints.compiler import CONSTRAINT_VIOLATED, GrammarCompiler
from outrider.engine.arrays import Array, Arrays
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.gpu_kernels import why_no_triton
from outrider.engine.pending import Pending, read
from outrider.engine.sampler.array_decider import ArrayDecider
from outrider.engine.sampler.distribution import sampling_distribution
from outrider.engine.sampler.edits import LogitEditor, Vocabulary, apply_by_kernel, apply_to_array
from outrider.engine.sampler.logprobs import pending_logprobs
from outrider.engine.sampler.native_decider import NativeDecider
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import SampledRows, SampleRows, SequenceSampling
from outrider.errors import InternalError
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams

if TYPE_CHECKING:
    from outrider.engine.sampler.triton_decider import TritonDecider

_WARM_UP_STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"min_p": 0.1, "top_k": 2, "top_p": 0.9},
    {"logit_bias": ((0, 1.0),), "min_tokens": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1},
)
"""Sampling parameters of each warm-up step, since kernels are compiled for the features that a step's rows use."""


class Sampler:
    """Applies steps 1 to 7 of the contract's SamplingParams to all rows of a step at once.

    Target and drafter use it alike: the drafter runs the same race on its own logits. Their tokens agree because both
    sides use the same random draws.

    Logits are numpy arrays with native kernels and torch tensors without. They stay on their device; only tokens and
    logprobs are returned to the host. Not thread-safe: one owner.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        known_token_ids: npt.NDArray[np.bool_],
        device: str = "cpu",
        kernels: CpuKernels | None = None,
        constraints: GrammarCompiler | None = None,
    ) -> None:
        """Args:
        vocab_size: width of the logits.
        known_token_ids: [vocab_size] bool, true for ids that the tokenizer has; at least one.
        device: the logits' device.
        kernels: native kernels, which decide tokens on a CPU; None: numpy or torch decides, with the same result.
        constraints: compiles constraints of requests for the same vocabulary; None: no request has any.
        """
        self._masks_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")  # the thread starts with the first masks
        self._masks_in_making: Future[Any] | None = None
        shape = tuple(known_token_ids.shape)
        assert shape == (vocab_size,), f"known_token_ids {shape} does not fit vocab_size {vocab_size}"
        self.vocab_size = vocab_size
        self._device = device
        self.constraints = constraints
        vocabulary = Vocabulary.of(np.asarray(known_token_ids))
        has_triton = kernels is None and not why_no_triton(device)
        self._editor = LogitEditor(vocabulary, apply_by_kernel if has_triton else apply_to_array)
        self.decider: NativeDecider | TritonDecider | ArrayDecider
        if kernels is not None:
            self.decider = NativeDecider(kernels, vocabulary)
        elif has_triton:
            from outrider.engine.sampler.triton_decider import TritonDecider

            self.decider = TritonDecider(self._editor)
        else:
            self.decider = ArrayDecider(self._editor)

    def warm_up(self) -> None:
        """Decides rows in each way for which kernels are compiled, so that no request waits seconds for compilation.

        On a CPU nothing is compiled. The compiler of constraints reads its tokenizer.
        """
        if self.constraints is not None:
            self.constraints.warm_up()
        if str(self._device).startswith("cpu"):
            return
        import torch

        logits = torch.zeros((2, self.vocab_size), device=self._device)
        for step in _WARM_UP_STEPS:
            for mode in (None, *LogprobsMode):
                state = self.start(
                    SamplingParams(seed=0, max_tokens=3, **step),
                    sample=0,
                    prompt_token_ids=(0,),
                    stop_token_ids=(0,),
                    logprobs=None if mode is None else LogprobsRequest(num_top=1, mode=mode),
                )
                self.sample(logits, [SampleRows(state, 1, (0,))])  # the second row follows a draft token

    def start(
        self,
        params: SamplingParams,
        *,
        sample: int,
        prompt_token_ids: Sequence[int],
        generated_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: LogprobsRequest | None = None,
    ) -> SequenceSampling:
        """Creates the state of one sample.

        Args:
            params: the request's parameters.
            sample: the sample's index, 0 to n - 1.
            prompt_token_ids: repetition_penalty counts them like generated tokens.
            generated_token_ids: tokens that are already committed.
            stop_token_ids: tokens that cannot be drawn before min_tokens are generated; include end-of-text ids unless
                the request ignores them.
            logprobs: None: no logprobs are requested.

        Raises: what `GrammarCompiler.start` raises.
        """
        penalties = PenaltyState(
            params,
            prompt_token_ids=prompt_token_ids,
            generated_token_ids=generated_token_ids,
            stop_token_ids=stop_token_ids,
            vocab_size=self.vocab_size,
        )
        constraint = None
        if params.constraint is not None:
            assert self.constraints is not None
            constraint = self.constraints.start(params.constraint, generated_token_ids)
        return SequenceSampling(
            params=params, sample=sample, logprobs=logprobs, penalties=penalties, constraint=constraint
        )

    def commit(self, state: SequenceSampling, token_ids: Sequence[int]) -> None:
        """Counts accepted tokens as generated; sets `state.failure` if a constraint does not allow them."""
        constraint, penalties = state.constraint, state.penalties
        if constraint is not None:
            constraint.commit(token_ids)
            state.failure = constraint.failure or state.failure
            has_forbidden = constraint.failure.startswith(CONSTRAINT_VIOLATED)  # e.g. id 0, drawn if no token is left
            early = [each for place, each in enumerate(token_ids) if penalties.bans_stops(place)]
            if (early and has_forbidden) or any(each in penalties.stop_ids for each in early):
                state.failure = "the constraint is complete before min_tokens"
        penalties.commit(token_ids)

    def prepare_masks(self, rows: Sequence[SampleRows]) -> None:
        """Computes the masks of constrained rows in a thread, while the forward computes their logits.

        The call that decides these rows waits for the masks. Until then, make no other call for their samples.
        """
        self._masks_in_making = self._masks_thread.submit(lambda: [part.masks() for part in rows])

    def sample(self, logits: Array, rows: Sequence[SampleRows]) -> SampledRows:
        """Decides every row.

        Args:
            logits: [num_rows, vocab] float32, not changed.
            rows: the rows' samples, in order; their `num_rows` add up to num_rows.

        Returns:
            A token for each row, and logprobs for samples that requested them.
        """
        return read(self.queue(logits, rows))[0]

    def queue(self, logits: Array, rows: Sequence[SampleRows]) -> Pending[SampledRows]:
        """Does what `sample` does, without waiting for the device."""
        if not rows:
            return Pending((), lambda _: SampledRows([], []))
        return self.with_logprobs(logits, rows, self.decide(logits, rows))

    def decide(self, logits: Array, rows: Sequence[SampleRows]) -> Array:
        """Returns a token for each row: [num_rows] int64, on the logits' device. At least one row. Does not wait for a
        GPU.

        All deciders give the same ids: they use the same float32 operations in the same order. A row with NaN yields
        the first NaN's id, and a row with no token left yields id 0.
        """
        return self.decider.decide(self._checked(logits, rows), rows)

    def with_logprobs(self, logits: Array, rows: Sequence[SampleRows], token_ids: Array) -> Pending[SampledRows]:
        """Returns `token_ids`, [num_rows] int64, with the requested logprobs. Other arguments as for `sample`."""
        if not [part for part in rows if part.state.logprobs is not None]:
            return Pending((token_ids,), lambda arrays: SampledRows(arrays[0].tolist(), [None] * len(arrays[0])))
        decisions = [decision for part in rows for decision in part.decisions()]
        logprobs = pending_logprobs(self._checked(logits, rows), decisions, token_ids, self._editor)

        def finish(arrays: Arrays) -> SampledRows:
            return SampledRows(arrays[0].tolist(), logprobs.finish(arrays[1:]))

        return Pending((token_ids, *logprobs.arrays), finish)

    def distribution(self, logits: Array, rows: Sequence[SampleRows]) -> Array:
        """Returns the distribution that each row's token is drawn from.

        Args:
            logits: [num_rows, vocab] float32, not changed.
            rows: as for `sample`; at least one.

        Returns:
            [num_rows, num_ids] float32, values whose softmax is the distribution, -inf for excluded tokens. Greedy
            rows have the values after step 4.
        """
        decisions = [decision for part in rows for decision in part.decisions()]
        return sampling_distribution(self._editor.edit(self._checked(logits, rows), decisions), decisions)

    def _checked(self, logits: Array, rows: Sequence[SampleRows]) -> Array:
        """Returns the logits once pending masks are done. Raises: InternalError if the logits do not fit the rows."""
        if self._masks_in_making is not None:
            self._masks_in_making.result()
            self._masks_in_making = None
        num_rows = len(rows) + sum([len(part.draft_token_ids) for part in rows])
        if logits.shape != (num_rows, self.vocab_size):
            raise InternalError(f"logits {tuple(logits.shape)} do not fit {num_rows} rows of {self.vocab_size}")
        return logits
