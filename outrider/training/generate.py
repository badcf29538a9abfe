"""Phase 1: collects the target's own answers from a running cluster."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from pathlib import Path

from outrider.answer import Completion
from outrider.client import AsyncClient
from outrider.errors import InvalidRequestError, OutriderError
from outrider.training.answer_files import AnswerWriter, KeptAnswer, read_answers
from outrider.training.plan import SEED, PhaseClock, Progress, TrainingPlan
from outrider.training.prompts import TrainingPrompt, read_prompts, tokenize, write_prompt

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""The temperature of each answer is drawn uniformly from these. Greedy answers teach the likeliest tokens, sampled ones
the others.
"""
MAX_ANSWERS_BYTES = 512 << 20
MIN_RESPONSE_TOKENS = 8
MAX_PASTED_TEXTS = 256
MIN_ANSWERS = 16  # with fewer answers, the phase continues beyond its time
MAX_EXTRA_SECONDS = 600.0  # maximum time that the phase may continue to reach `MIN_ANSWERS`
MAX_FAILURES_IN_A_ROW = 8  # consecutive failed requests after which a task gives up
RETRY_SECONDS = 0.5
REPORT_SECONDS = 1.0


def answers_folder(plan: TrainingPlan) -> Path:
    return plan.work / "answers"


def write_answers(plan: TrainingPlan, address: str, clock: PhaseClock, *, seconds: float, progress: Progress) -> None:
    """Sends requests to the cluster at `address` until the phase has taken `seconds` or the prompt file is used up.

    Raises: OutriderError if requests keep failing.
    """
    asyncio.run(_Asking(plan, clock, seconds, progress).run(address))


class _Asking:
    """Runs many concurrent requests and writes each answer as it arrives."""

    def __init__(self, plan: TrainingPlan, clock: PhaseClock, seconds: float, progress: Progress) -> None:
        self._plan, self._clock, self._seconds, self._progress = plan, clock, seconds, progress
        folder = answers_folder(plan)
        self._known = {tuple(answer.prompt) for answer in read_answers(folder)}
        # The seed changes after each interruption, so that the same prompts are not written again.
        self._rng = random.Random(f"{SEED} {len(self._known)}")  # noqa: S311 no secret
        self._given = None if plan.prompts is None else iter(read_prompts(plan.prompts))
        self._pasted: deque[str] = deque(maxlen=MAX_PASTED_TEXTS)
        self._writer = AnswerWriter(folder, max_bytes=MAX_ANSWERS_BYTES)

    async def run(self, address: str) -> None:
        async with AsyncClient(address) as client:
            work = {asyncio.create_task(self._work(client)) for _ in range(self._plan.concurrency)}
            left = work
            try:
                while left and (seconds_left := self._seconds_left()) > 0:
                    done, left = await asyncio.wait(
                        work, timeout=min(REPORT_SECONDS, seconds_left), return_when=asyncio.FIRST_EXCEPTION
                    )
                    for each in done:
                        each.result()
                    self._clock.keep()
                    seconds = self._clock.seconds
                    self._progress("answers, seconds", int(seconds), int(max(self._seconds, seconds)))
            finally:
                for each in work:
                    each.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                self._writer.close()

    def _seconds_left(self) -> float:
        """Returns the remaining seconds of the phase, plus `MAX_EXTRA_SECONDS` while there are too few answers."""
        extra = MAX_EXTRA_SECONDS if len(self._known) < MIN_ANSWERS else 0.0
        return self._seconds + extra - self._clock.seconds

    async def _work(self, client: AsyncClient) -> None:
        prompt: TrainingPrompt | None = None
        failures = 0
        while True:
            try:
                prompt = prompt or await self._next_prompt(client)
                if prompt is None:
                    return
                if tuple(prompt[1]) not in self._known:
                    await self._answer(client, *prompt)
                prompt, failures = None, 0
            except OutriderError as error:
                failures += 1
                if failures > MAX_FAILURES_IN_A_ROW:
                    raise
                if isinstance(error, InvalidRequestError):
                    prompt = None  # e.g. the prompt is too long; the next one is tried
                else:
                    await asyncio.sleep(failures * RETRY_SECONDS)

    async def _next_prompt(self, client: AsyncClient) -> TrainingPrompt | None:
        """Returns the next prompt of the file, or None at its end; without a file, a new prompt each time."""
        if self._given is None:
            return await write_prompt(client, self._rng, self._pasted)
        for kind, chat in self._given:
            return kind, await tokenize(client, chat)
        return None

    async def _answer(self, client: AsyncClient, kind: str, token_ids: list[int]) -> None:
        temperature = self._rng.choice(TEMPERATURES)
        result = await client.complete(
            token_ids,
            temperature=temperature,
            max_tokens=self._plan.max_answer_tokens,
            seed=self._rng.randrange(1 << 31),
        )
        if temperature < 1:
            self._pasted.append(result.text)
        response = _whole(result.completions[0])
        if len(response) >= MIN_RESPONSE_TOKENS or self._given is not None:
            self._known.add(tuple(token_ids))
            self._writer.append(KeptAnswer(token_ids, response, temperature, kind))


def _whole(completion: Completion) -> list[int]:
    """Returns the token ids of an answer, including its stop token."""
    token_ids, end = list(completion.token_ids), completion.finished.stop_token_id
    return [*token_ids, end] if end is not None and token_ids[-1:] != [end] else token_ids
