"""Admission of sequence groups. Each group is granted or refused immediately, since only routers queue requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from decode_node.groups import GroupTable, Sample
from outrider.engine.kv_cache.block_pool import BlockPool
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from outrider.request import MAX_CACHE_SALT_BYTES, MAX_TOP_LOGPROBS, RequestOptions, SamplingParams
from outrider.session import NO_ROOM_RETRY_SECONDS, OpenSequenceGroup, RejectReason, SampleStart

INITIAL_MEAN_OUTPUT_TOKENS = 128.0
MEAN_OUTPUT_WEIGHT = 0.05  # weight of the newest finished sample in the running mean

HOLD_BACK_SECONDS = 0.5
"""Maximum seconds for which a router that holds its share is turned away, so that others get room first."""

CLAIM_SECONDS = NO_ROOM_RETRY_SECONDS + 1.0
"""Seconds for which a router counts as waiting for room after a refusal. It asks again before they have passed."""


class Admission:
    """Admits a group if enough KV blocks are free.

    It needs blocks for its prompt, for the expected growth of all sequences, and a spare one for each sequence that is
    already on the node. Expected growth is the running mean of output lengths, bounded by each request's max_tokens. So
    the pool neither idles for output that never comes nor fills up so far that preemption is the rule.
    """

    def __init__(self, pool: BlockPool, *, max_running_sequences: int, max_model_len: int, vocab_size: int) -> None:
        self._pool = pool
        self.max_running_sequences = max_running_sequences
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._mean_output_tokens = INITIAL_MEAN_OUTPUT_TOKENS

    def observe_finished(self, num_generated: int) -> None:
        self._mean_output_tokens += MEAN_OUTPUT_WEIGHT * (num_generated - self._mean_output_tokens)

    def why_invalid(self, opened: OpenSequenceGroup, compiled: Future[Any] | None) -> tuple[RejectReason, str] | None:
        """Returns a permanent reason to reject the group, or None. A router that validates requests never gets one.

        `compiled`: the group's compiled constraint, if it has one.
        """
        sampling = opened.options.sampling
        num_prompt = len(opened.prompt_token_ids)
        if num_prompt == 0 or sampling.n < 1 or sampling.max_tokens < 1:
            return RejectReason.INVALID, "the prompt must not be empty, and n and max_tokens must be at least 1"
        if len(opened.options.cache_salt) > MAX_CACHE_SALT_BYTES:
            return RejectReason.INVALID, f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes"
        longest = num_prompt + sampling.max_tokens
        if longest > self._max_model_len:
            return (
                RejectReason.TOO_LARGE,
                f"prompt and max_tokens are {longest} tokens, the limit is {self._max_model_len}",
            )
        indexes = [start.sample for start in opened.samples]
        if not indexes or indexes != sorted(set(indexes)) or indexes[-1] >= sampling.n:
            return RejectReason.INVALID, f"samples must be ascending indexes below {sampling.n}, not {indexes}"
        generated = [start.generated_token_ids for start in opened.samples]
        for index, token_ids in zip(indexes, generated, strict=True):
            if len(token_ids) >= sampling.max_tokens:
                return RejectReason.INVALID, f"sample {index} already has max_tokens tokens"
        if max(max(token_ids, default=0) for token_ids in (opened.prompt_token_ids, *generated)) >= self._vocab_size:
            return RejectReason.INVALID, f"token ids must be below the vocabulary size {self._vocab_size}"
        if not (_is_in_range(sampling) and _may_be_answered(opened.options)):
            return RejectReason.INVALID, "a sampling parameter is out of range"
        if compiled is not None and (error := compiled.exception()) is not None:
            return RejectReason.INVALID, str(error)
        num_samples = len(opened.samples)
        if num_samples > self.max_running_sequences:
            message = (
                f"the group has {num_samples} samples, the node runs at most {self.max_running_sequences} sequences"
            )
            return RejectReason.TOO_LARGE, message
        needed = self._pool.num_blocks_for(longest)
        if num_samples > 1:  # each continues in a copy of the prompt's last block, unless that block is full
            own = needed - num_prompt // self._pool.block_size
            needed = self._pool.num_blocks_for(num_prompt) + num_samples * own
        most = self._pool.num_blocks_together
        if needed > most:
            return RejectReason.TOO_LARGE, f"the group needs {needed} KV blocks, the node has {most}"
        return None

    def blocks_needed(
        self, opened: OpenSequenceGroup, kv: SequenceKV, *, num_shared: int, num_new_blocks: int, groups: GroupTable
    ) -> int:
        """Returns how many blocks of a table's pool must be free to admit the group. If no other group has blocks of
        it, expected growth does not count.

        Args:
            opened: the group that asks for room.
            kv: a table that takes its blocks where the group does.
            num_shared: number of tokens with which all its samples begin.
            num_new_blocks: blocks that those tokens need beyond the cached prefix.
            groups: the groups on this node.
        """
        beside = groups.beside(kv)
        if not beside:
            return num_new_blocks
        growth = num_sequences = 0
        for group in beside:
            num_sequences += len(group.samples) + len(group.unstarted_samples)
            growth += sum(map(self._growth_of_running, group.samples.values()))
            growth += sum(
                self._growth_of_start(group.opened, start, num_shared=len(group.shared_token_ids))
                for start in group.unstarted_samples
            )
        growth += sum(self._growth_of_start(opened, start, num_shared=num_shared) for start in opened.samples)
        return num_new_blocks + growth + num_sequences

    def _growth_of_running(self, sample: Sample) -> int:
        """Returns how many blocks a sample needs for its expected new tokens and its known tokens without a block."""
        sequence = sample.sequence
        capacity = 0 if sequence.kv is None else sequence.kv.capacity
        num_unreserved = max(0, len(sequence.token_ids) - 1 - capacity)
        expected = max(1.0, min(sample.num_tokens_left, self._mean_output_tokens - sample.num_generated))
        return self._pool.num_blocks_for(num_unreserved + int(expected))

    def _growth_of_start(self, opened: OpenSequenceGroup, start: SampleStart, *, num_shared: int) -> int:
        """Returns how many blocks a sample needs for its own known tokens (except the newest) and its expected ones."""
        num_generated = len(start.generated_token_ids)
        num_own = len(opened.prompt_token_ids) + num_generated - num_shared - 1
        left = opened.options.sampling.max_tokens - num_generated
        expected = max(1.0, min(left, self._mean_output_tokens - num_generated))
        return max(1, self._pool.num_blocks_for(num_own + int(expected)))


def _is_in_range(sampling: SamplingParams) -> bool:
    """Returns whether all parameters are within the API's ranges. NaN is outside every range."""
    return (
        0.0 <= sampling.temperature < math.inf
        and 0.0 < sampling.top_p <= 1.0
        and sampling.top_k >= 0
        and 0.0 <= sampling.min_p <= 1.0
        and all(-2.0 <= penalty <= 2.0 for penalty in (sampling.presence_penalty, sampling.frequency_penalty))
        and 0.0 < sampling.repetition_penalty < math.inf
        and all(math.isfinite(bias) for _, bias in sampling.logit_bias)
    )


def _may_be_answered(options: RequestOptions) -> bool:
    num_top = 0 if options.logprobs is None else options.logprobs.num_top
    return 0 <= num_top <= MAX_TOP_LOGPROBS and 0 <= (options.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS


class FairShares:
    """Limits what each router holds while another one waits for room. Engine thread only.

    While another session waits, a session is refused if it already holds its share of the blocks or of the sequences.
    A share is the total divided by the number of sessions that hold or want part of it. Sessions below their share are
    admitted as long as there is room. If no session waits, there is no limit. Each open session has at most one claim.
    """

    def __init__(self, pool: BlockPool, *, max_running_sequences: int, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._max_running = max_running_sequences
        self._clock = clock
        self._claims: dict[int, float] = {}  # by session id: the time until which the session counts as waiting

    def claim(self, session_id: int) -> None:
        """Records that the session was refused for lack of room."""
        self._claims[session_id] = self._clock() + CLAIM_SECONDS

    def settle(self, session_id: int) -> None:
        """Removes the claim of a session that was admitted or has ended."""
        self._claims.pop(session_id, None)

    def hold_back_seconds(self, session_id: int, groups: GroupTable) -> float:
        """Returns the seconds for which the session has to leave room to others; 0 if it may be admitted."""
        now = self._clock()
        for claimant, until in tuple(self._claims.items()):
            if now >= until:
                del self._claims[claimant]
        others = [until for claimant, until in self._claims.items() if claimant != session_id]
        if not others:
            return 0.0
        contenders = {session_id, *self._claims, *(group.session_id for group in groups)}
        if self._held(session_id, groups) * len(contenders) < 1.0:
            return 0.0
        return min(HOLD_BACK_SECONDS, max(others) - now)

    def _held(self, session_id: int, groups: GroupTable) -> float:
        """Returns the session's fraction (0 to 1) of the sequences or of a pool's blocks, whichever is largest."""
        mine = groups.of_session(session_id)
        num_sequences = sum(len(group.samples) + len(group.unstarted_samples) for group in mine)
        blocks = {block_id for group in mine for kv in group.tables() for block_id in kv.block_ids}
        tables = [table for group in mine for kv in group.tables() for table in kv.windows]
        parts = [
            sum(table.num_held for table in tables if table.pool is pool) / pool.num_blocks
            for pool in self._pool.windows
        ]
        return max(num_sequences / self._max_running, len(blocks) / self._pool.num_blocks, *parts)
