"""The sampler: logits rows in, chosen tokens and their logprobs out.

A decision depends on its own row of logits, its sample's parameters, the seed, the sample
and the position, and on the tokens before it: never on what else is in the batch, nor on
where a draft came from. All arithmetic is row by row, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.sampler.decider import Decider, Vocabulary
from outrider.engine.sampler.logit_blocks import LogitBlocks
from outrider.engine.sampler.logprobs import model_logprobs, sampled_logprobs
from outrider.engine.sampler.native_decider import NativeDecider
from outrider.engine.sampler.numpy_decider import NumpyDecider
from outrider.engine.sampler.penalties import PenaltyState
from outrider.engine.sampler.sequence_sampling import SampledRows, SampleRows, SequenceSampling
from outrider.errors import InternalError
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float32]

_CACHE_BYTES = 128 * 1024 * 1024


class Sampler:
    """Steps 1 to 7 of the contract's SamplingParams, for all rows of a step at once.

    Target and drafter use it alike: the drafter runs the same race on its own logits, and
    the same luck on both sides is what makes their tokens agree.

    Works on the CPU: logits of another device are copied over, unless every row is plainly
    greedy. Not thread-safe: one owner.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        known_token_ids: Tensor,
        device: torch.device | str = "cpu",
        kernels: CpuKernels | None = None,
        arrival_cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """Args:
        vocab_size: width of the logits.
        known_token_ids: [vocab_size] bool, ids that the tokenizer has; at least one.
        device: where the logits will be; on CUDA they come over through page-locked memory.
        kernels: None: numpy decides, to the same ids.
        arrival_cache_bytes: bound of the cache of arrivals that numpy needs.
        """
        shape = tuple(known_token_ids.shape)
        assert shape == (vocab_size,), f"known_token_ids {shape} does not fit vocab_size {vocab_size}"
        self.vocab_size = vocab_size
        self._vocabulary = Vocabulary.of(known_token_ids)
        self._decider: Decider = (
            NumpyDecider(self._vocabulary, arrival_cache_bytes=arrival_cache_bytes)
            if kernels is None
            else NativeDecider(kernels, self._vocabulary)
        )
        self._stages = torch.device(device).type == "cuda"
        self._staging = torch.empty((0, vocab_size))  # page-locked, grown to the largest step so far

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
        """The state of one sample.

        Args:
            params: of the request.
            sample: 0 to n - 1.
            prompt_token_ids: what repetition_penalty counts besides generated tokens.
            generated_token_ids: already committed.
            stop_token_ids: cannot be drawn while fewer than min_tokens are generated;
                end-of-text ids included unless the request ignores them.
            logprobs: None for none.
        """
        penalties = PenaltyState(
            params,
            prompt_token_ids=prompt_token_ids,
            generated_token_ids=generated_token_ids,
            stop_token_ids=stop_token_ids,
            vocab_size=self.vocab_size,
        )
        prepared = self._decider.prepare(params, sample=sample, penalties=penalties)
        return SequenceSampling(params=params, sample=sample, logprobs=logprobs, penalties=penalties, prepared=prepared)

    def commit(self, state: SequenceSampling, token_ids: Sequence[int]) -> None:
        """Counts accepted tokens as generated."""
        state.penalties.commit(token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRows]) -> SampledRows:
        """Decides every row.

        Args:
            logits: [num_rows, vocab] float32, not changed.
            rows: whose they are, in order; their `num_rows` add up to num_rows.

        Returns:
            A token for each row, and logprobs for those of samples that asked for them.
        """
        num_rows = sum(part.num_rows for part in rows)
        if logits.shape != (num_rows, self.vocab_size):
            raise InternalError(f"logits {tuple(logits.shape)} do not fit {num_rows} rows of {self.vocab_size}")
        if num_rows == 0:
            return SampledRows()
        if logits.device.type != "cpu" and all(self._is_plainly_greedy(part) for part in rows):
            with torch.inference_mode():
                token_ids = first_of_largest(logits[:, : self._vocabulary.num_ids]).tolist()
            return SampledRows(token_ids, [None] * num_rows)
        host = self._to_host(logits)
        token_ids = self._decider.decide(host, rows)
        if all(part.state.logprobs is None for part in rows):
            return SampledRows(token_ids, [None] * num_rows)
        with np.errstate(over="ignore", invalid="ignore"):
            return SampledRows(token_ids, self._logprobs(host.numpy(), rows, token_ids))

    def _to_host(self, logits: Tensor) -> Tensor:
        """The logits here, without a copy where they are already: [num_rows, vocab] float32, contiguous."""
        logits = logits.detach()
        if not self._stages or logits.device.type == "cpu":
            return logits.to("cpu", torch.float32).contiguous()
        with torch.inference_mode():  # the buffer stays what it is, whatever mode a caller is in
            if len(self._staging) < len(logits):
                self._staging = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            return self._staging[: len(logits)].copy_(logits)

    def _is_plainly_greedy(self, part: SampleRows) -> bool:
        """Whether its rows are decided by nothing but the largest of their logits."""
        state = part.state
        return (
            state.params.is_greedy
            and state.logprobs is None
            # later rows assume more, and change no more
            and not self._vocabulary.edits(state.penalties, len(part.assumed_token_ids))
        )

    def _logprobs(
        self, host: Floats, rows: Sequence[SampleRows], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Those of samples that asked for them, row by row."""
        logprobs: list[TokenLogprobs | None] = []
        for part in rows:
            for j in range(part.num_rows):
                index = len(logprobs)
                asks = part.state.logprobs is not None
                logprobs.append(self._logprobs_of_row(host[index], part, j, token_ids[index]) if asks else None)
        return logprobs

    def _logprobs_of_row(self, logits: Floats, part: SampleRows, j: int, token_id: int) -> TokenLogprobs:
        """Of the part's row j, whose logits [vocab] float32 are not changed."""
        state, assumed = part.state, part.assumed_at(j)
        assert state.logprobs is not None
        num_top = state.logprobs.num_top
        if state.logprobs.mode is LogprobsMode.MODEL:
            return model_logprobs(logits, token_id, num_top=num_top)
        if self._vocabulary.edits(state.penalties, len(assumed)):
            logits = logits.copy()
            self._vocabulary.edit(logits, state.penalties, assumed)
        temperature = 1.0 if state.params.is_greedy else state.params.temperature
        blocks = LogitBlocks.of(
            logits[None],
            np.zeros(1, dtype=np.int64),
            np.asarray([temperature], dtype=np.float32),
            num_ids=self._vocabulary.num_ids,
        )
        return sampled_logprobs(blocks, 0, state.params, token_id, num_top=num_top)


def first_of_largest(logits: Tensor) -> Tensor:
    """Argmax of each row with ties to the lowest id, which torch.argmax does not promise on every device.

    [num_rows, num_ids] -> [num_rows] int64.
    """
    is_largest = logits == logits.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(is_largest, ids, logits.shape[1] - 1).amin(dim=1)
