"""Phase 1: the target's own answers, through a running cluster."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from outrider.answer import Completion
from outrider.client import AsyncClient
from outrider.errors import InvalidRequestError, OutriderError
from outrider.training.answer_files import AnswerWriter, KeptAnswer, read_answers
from outrider.training.plan import PhaseClock, Progress, TrainingPlan
from outrider.training.prompts import FilePrompts, OwnPrompts, PromptSource, TrainingPrompt

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Drawn from, evenly. Greedy answers teach what is likeliest, sampled ones what else is said."""
MAX_ANSWERS_BYTES = 512 << 20
MIN_RESPONSE_TOKENS = 8
MIN_ANSWERS = 16  # even if the time is over
MAX_EXTRA_SECONDS = 600.0  # for those
MAX_FAILURES_IN_A_ROW = 8  # of one of those who ask
RETRY_SECONDS = 0.5
REPORT_SECONDS = 1.0


def answers_folder(plan: TrainingPlan) -> Path:
    return plan.work / "answers"


def write_answers(plan: TrainingPlan, address: str, clock: PhaseClock, *, seconds: float, progress: Progress) -> None:
    """Asks the cluster at `address` until the phase has taken `seconds`, or all prompts of a file are answered.

    Raises: OutriderError when requests fail again and again.
    """
    asyncio.run(_Asking(plan, clock, seconds, progress).run(address))


class _Asking:
    """Many requests at once, each answer written as it comes."""

    def __init__(self, plan: TrainingPlan, clock: PhaseClock, seconds: float, progress: Progress) -> None:
        self._plan, self._clock, self._seconds, self._progress = plan, clock, seconds, progress
        folder = answers_folder(plan)
        kept = list(read_answers(folder))
        self._known = {tuple(answer.prompt) for answer in kept}
        self._num_tokens = sum(len(answer.response) for answer in kept)
        # Another seed after each interruption: the same prompts again would be lost work.
        self._rng = random.Random(f"{plan.seed} {len(kept)}")  # noqa: S311 no secret
        self._source: PromptSource = OwnPrompts(self._rng) if plan.prompts is None else FilePrompts(plan.prompts)
        self._writer = AnswerWriter(folder, max_bytes=MAX_ANSWERS_BYTES)

    async def run(self, address: str) -> None:
        async with AsyncClient(address) as client:
            clock = asyncio.create_task(self._run_out())
            work = asyncio.gather(*(self._work(client) for _ in range(self._plan.concurrency)))
            ends: list[asyncio.Future[Any]] = [clock, work]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                clock.cancel()
                work.cancel()
                await asyncio.gather(clock, work, return_exceptions=True)
                self._writer.close()

    async def _work(self, client: AsyncClient) -> None:
        prompt: TrainingPrompt | None = None
        failures = 0
        while True:
            try:
                prompt = prompt or await self._source.next(client)
                if prompt is None:
                    return
                if tuple(prompt.token_ids) not in self._known:
                    self._keep(await self._answer(client, prompt))
                prompt, failures = None, 0
            except OutriderError as error:
                failures += 1
                if failures > MAX_FAILURES_IN_A_ROW:
                    raise
                if isinstance(error, InvalidRequestError):
                    prompt = None  # too long, say: the next one
                else:
                    await asyncio.sleep(failures * RETRY_SECONDS)

    async def _answer(self, client: AsyncClient, prompt: TrainingPrompt) -> KeptAnswer:
        temperature = self._rng.choice(TEMPERATURES)
        result = await client.complete(
            prompt.token_ids,
            temperature=temperature,
            max_tokens=self._plan.max_answer_tokens,
            seed=self._rng.randrange(1 << 31),
        )
        if temperature < 1:
            self._source.hear(result.text)
        return KeptAnswer(prompt.token_ids, _whole(result.completions[0]), temperature, prompt.kind)

    def _keep(self, answer: KeptAnswer) -> None:
        if len(answer.response) < MIN_RESPONSE_TOKENS and self._plan.prompts is None:
            return
        self._known.add(tuple(answer.prompt))
        self._num_tokens += len(answer.response)
        self._writer.append(answer)

    async def _run_out(self) -> None:
        """Until the time is over and some answers are there; reports meanwhile."""
        while self._clock.seconds < self._seconds or (
            len(self._known) < MIN_ANSWERS and self._clock.seconds < self._seconds + MAX_EXTRA_SECONDS
        ):
            await asyncio.sleep(min(REPORT_SECONDS, max(self._seconds - self._clock.seconds, 0.1)))
            self._clock.keep()
            stage = f"{len(self._known)} answers, {self._num_tokens} tokens; seconds"
            self._progress(stage, int(self._clock.seconds), int(self._seconds))


def _whole(completion: Completion) -> list[int]:
    """With the token that ended it."""
    token_ids, end = list(completion.token_ids), completion.finished.stop_token_id
    return [*token_ids, end] if end is not None and token_ids[-1:] != [end] else token_ids
