"""Serves mistral.rs by lines of JSON (see asking.LineServer), in its own environment.

mistral.rs takes and returns texts, not token ids. The ids of a prompt are turned into a text, of which mistral.rs must
make the same number of ids again. A token without a text, such as the end of a message, is counted with the next one.
"""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from mistralrs import ChatCompletionRequest, Runner, Which
from serve_lines import arguments_parser, asked, say

UNKNOWN = -1  # in place of a token id
TEMPLATE = "{{ messages[0]['content'] }}"  # adds nothing to a prompt


def main() -> None:
    arguments = arguments_parser().parse_args()
    model = Path(arguments.model)
    with tempfile.TemporaryDirectory() as work:
        template = Path(work) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        runner = Runner(
            which=Which.GGUF(quantized_model_id=str(model.parent), quantized_filename=model.name),
            jinja_explicit=str(template),
            max_seqs=arguments.slots,
            prefix_cache_n=0,
        )
    starting = threading.Lock()
    say(ready=True)
    with ThreadPoolExecutor(arguments.slots) as threads:
        for number, prompt in asked():
            threads.submit(answer, runner, starting, number, prompt, max_tokens=arguments.max_tokens)


def answer(runner: Runner, starting: threading.Lock, number: int, prompt: list[int], *, max_tokens: int) -> None:
    """Says an answer.

    `starting`: held while a prompt is computed, because quantised prompts of equal length fail in one batch.
    """
    num_said = 0
    try:
        with starting:
            request = ChatCompletionRequest(
                messages=runner.detokenize_text(prompt, skip_special_tokens=False),
                model="default",
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                stream=True,
            )
            chunks = iter(runner.send_chat_completion_request(request))
            first = next(chunks)
        for chunk in chain([first], chunks):
            num_new = chunk.usage.completion_tokens - num_said if chunk.usage else 1
            if chunk.usage and chunk.usage.prompt_tokens != len(prompt):
                raise ValueError(f"it made {chunk.usage.prompt_tokens} tokens of a prompt of {len(prompt)}")
            num_said += num_new
            say(id=number, tokens=[UNKNOWN] * num_new)
        say(id=number, done=True)
    except (ValueError, RuntimeError, StopIteration) as error:
        say(id=number, error=f"{type(error).__name__}: {error}".partition("\n")[0])


if __name__ == "__main__":
    main()
