"""A batch of prompts without a running server: the script starts the processes and stops them at its end.

python examples/offline_batch.py [MODEL]
"""

from __future__ import annotations

import sys

from outrider import LLM, SamplingParams

PROMPTS = ("The three primary colours are", "def is_prime(n):", "Dear Sir or Madam,", "Once upon a time")


def main(*model: str) -> None:
    with LLM(*model) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, n=2, max_tokens=24)):
            print(f"{output.prompt!r}")
            for completion in output.outputs:
                print(f"  {completion.finish_reason:>6}  {completion.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
