"""Phase 1: collects the target's own answers from a running cluster."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from pathlib import Path

from outrider.answer import Completion
from outrider.client import AsyncClient
from outrider.errors import InvalidRequestError, OutriderError
from outrider.training.answer_files import AnswerWriter, KeptAnswer, read_answers
from outrider.training.dataset import prompt_key
from outrider.training.plan import SEED, PhaseClock, Progress, Say, TrainingPlan
from outrider.training.prompts import TrainingPrompt, read_prompts, tokenize, write_prompt

SAMPLED = (0.7, 1.0)
TEMPERATURES = (0.0, 0.0, *SAMPLED)
"""The temperature of an answer to a given prompt is drawn uniformly from these. Greedy answers teach the likeliest
tokens, sampled ones the others. Each prompt that the target writes itself gets two answers, a greedy one and a sampled
one. Since such a prompt takes 0.4 times as long as an answer, this gives a sixth more answer tokens in the same time
than one answer to each prompt.
"""
MAX_ANSWERS_BYTES = 8 << 30
"""Limit of the answers' files; the oldest answers go first. It is enough for 700 million answer tokens."""
MIN_RESPONSE_TOKENS = 8
MAX_PASTED_TEXTS = 256
MIN_ANSWERS = 16  # with fewer answers, the phase continues beyond its time
MAX_EXTRA_SECONDS = 600.0  # maximum time that the phase may continue to reach `MIN_ANSWERS`
MAX_FAILURES_IN_A_ROW = 8  # consecutive failed requests after which a task gives up
RETRY_SECONDS = 0.5
REPORT_SECONDS = 1.0
SAY_SECONDS = 60.0


def answers_folder(plan: TrainingPlan) -> Path:
    return plan.work / "answers"


class AnswerPhase:
    """Sends many requests at once, and writes each answer as it arrives.

    It ends when there are `plan.answer_tokens` or, if that is 0, when the phase has taken `seconds`; and earlier if the
    prompt file is used up.
    """

    def __init__(self, plan: TrainingPlan, clock: PhaseClock, seconds: float, say: Say, progress: Progress) -> None:
        self._plan, self._clock, self._seconds = plan, clock, seconds
        self._say, self._progress = say, progress
        folder = answers_folder(plan)
        self._known: set[bytes] = set()  # keys of prompts that have answers
        self._num_answers = self._num_tokens = 0
        for answer in read_answers(folder):
            self._count(answer)
        # The seed changes after each interruption, so that the same prompts are not written again.
        self._rng = random.Random(f"{SEED} {len(self._known)}")  # noqa: S311 no secret
        self._given = None if plan.prompts is None else iter(read_prompts(plan.prompts))
        self._pasted: deque[str] = deque(maxlen=MAX_PASTED_TEXTS)
        self._writer = AnswerWriter(folder, max_bytes=MAX_ANSWERS_BYTES)

    async def run(self, address: str) -> None:
        """Runs the phase with the cluster at `address`. Raises: OutriderError if requests keep failing."""
        async with AsyncClient(address) as client:
            work = {asyncio.create_task(self._work(client)) for _ in range(self._plan.concurrency)}
            left = work
            try:
                said_at, num_before = self._clock.seconds, self._num_tokens
                while left and (seconds_left := self._seconds_left()) > 0:
                    done, left = await asyncio.wait(
                        work, timeout=min(REPORT_SECONDS, seconds_left), return_when=asyncio.FIRST_EXCEPTION
                    )
                    for each in done:
                        each.result()
                    self._clock.keep()
                    self._show_progress()
                    if (passed := self._clock.seconds - said_at) >= SAY_SECONDS:
                        self._say_rate((self._num_tokens - num_before) / passed)
                        said_at, num_before = self._clock.seconds, self._num_tokens
            finally:
                for each in work:
                    each.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                self._writer.close()

    def _show_progress(self) -> None:
        if self._plan.answer_tokens:
            amounts = self._num_tokens // 1000, self._plan.answer_tokens // 1000
            self._progress("answers, thousand tokens", *amounts)
        else:
            seconds = self._clock.seconds
            self._progress("answers, seconds", int(seconds), int(max(self._seconds, seconds)))

    def _say_rate(self, rate: float) -> None:
        left = self._seconds_left()
        if self._plan.answer_tokens:
            left = (self._plan.answer_tokens - self._num_tokens) / rate if rate else math.inf
        self._say(f"answers: {self._num_tokens} tokens, {rate:.0f} tokens/s, {max(left, 0) / 60:.0f} minutes left")

    def _count(self, answer: KeptAnswer) -> None:
        self._known.add(prompt_key(answer.prompt))
        self._num_answers += 1
        self._num_tokens += len(answer.response)

    def _seconds_left(self) -> float:
        """Returns the remaining seconds of the phase, plus `MAX_EXTRA_SECONDS` while there are too few answers."""
        if self._plan.answer_tokens:
            return 0.0 if self._num_tokens >= self._plan.answer_tokens else math.inf
        extra = MAX_EXTRA_SECONDS if self._num_answers < MIN_ANSWERS else 0.0
        return self._seconds + extra - self._clock.seconds

    async def _work(self, client: AsyncClient) -> None:
        prompt: TrainingPrompt | None = None
        failures = 0
        while True:
            try:
                prompt = prompt or await self._next_prompt(client)
                if prompt is None:
                    return
                if prompt_key(prompt[1]) not in self._known:
                    own = 0.0, self._rng.choice(SAMPLED)
                    for temperature in own if self._given is None else [self._rng.choice(TEMPERATURES)]:
                        await self._answer(client, *prompt, temperature)
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

    async def _answer(self, client: AsyncClient, kind: str, token_ids: list[int], temperature: float) -> None:
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
            answer = KeptAnswer(token_ids, response, temperature, kind)
            self._writer.append(answer)
            self._count(answer)


def _whole(completion: Completion) -> list[int]:
    """Returns the token ids of an answer, including its stop token."""
    token_ids, end = list(completion.token_ids), completion.finished.stop_token_id
    return [*token_ids, end] if end is not None and token_ids[-1:] != [end] else token_ids
