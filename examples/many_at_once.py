"""Several concurrent prompts, each with three samples.

python examples/many_at_once.py [HOST:PORT]
"""

from __future__ import annotations

import asyncio
import sys

from outrider.client import AsyncClient, CompleteResult

PROMPTS = ("The three primary colours are", "def is_prime(n):", "Dear Sir or Madam,", "Once upon a time")


async def main(target: str) -> None:
    async with AsyncClient(target) as client:
        sampling = (await client.model()).default_sampling or {"temperature": 0.7}

        async def ask(index: int, prompt: str) -> CompleteResult:
            return await client.complete(prompt, **sampling, n=3, seed=index, max_tokens=24, stop=["\n\n"])

        answers = await asyncio.gather(*(ask(index, prompt) for index, prompt in enumerate(PROMPTS)))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r}")
        for completion in answer.completions:
            print(f"  {completion.finished.reason.value:>6}  {completion.text!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
