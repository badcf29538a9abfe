"""Serves ik_llama.cpp by lines of JSON (see asking.LineServer), in its own environment.

The wheel's own class takes one prompt at a time and searches the logits in Python. This script batches continuously by
the wheel's bindings of the C functions: each step decodes one token of each running answer, and part of one prompt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import ik_llama_cpp._ctypes_api as native
import numpy as np
from ik_llama_cpp._internals import IkContext, IkModel
from serve_lines import Inbox, arguments_parser, inbox_of_prompts, say


@dataclass(slots=True)
class Running:
    """A prompt and its answer. `waiting`: token ids that are not yet computed."""

    number: int
    slot: int
    waiting: list[int]
    num_computed: int = 0
    num_said: int = 0


def main() -> None:
    arguments = arguments_parser().parse_args()
    model = IkModel(arguments.model)
    context = IkContext(
        model,
        n_ctx=arguments.context,
        n_threads=arguments.threads,
        n_seq_max=arguments.slots,
        flash_attn=False,  # as the wheel's own class does, because long prompts fail with it on many processors
    )
    inbox = inbox_of_prompts()
    say(ready=True)
    serve(context, inbox, num_slots=arguments.slots, max_tokens=arguments.max_tokens)


def serve(context: IkContext, inbox: Inbox, *, num_slots: int, max_tokens: int) -> None:
    """Serves prompts until standard input ends. Raises: RuntimeError if a step fails."""
    remove = native._lib.llama_kv_cache_seq_rm  # noqa: SLF001 the wheel does not bind this function
    remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    running: dict[int, Running] = {}  # by slot
    while True:
        while not running or (len(running) < num_slots and not inbox.empty()):
            asked = inbox.get()
            if asked is None:
                return
            slot = min({*range(num_slots)} - {*running})
            running[slot] = Running(asked[0], slot, asked[1])
        for answer, token_id in step(context, list(running.values())):
            say(id=answer.number, tokens=[token_id])
            answer.waiting = [token_id]
            answer.num_said += 1
            if answer.num_said == max_tokens:
                say(id=answer.number, done=True)
                del running[answer.slot]
                remove(context.ctx, answer.slot, -1, -1)


def step(context: IkContext, running: Sequence[Running]) -> list[tuple[Running, int]]:
    """Computes one batch. Returns the next token of each answer of which no token waits any more.

    Raises: RuntimeError if the batch fails.
    """
    room = native.llama_n_ubatch(context.ctx)
    batch = native.llama_batch_init(room, 0, 1)
    at, complete = 0, []
    for answer in sorted(running, key=lambda answer: len(answer.waiting)):
        taken, answer.waiting = answer.waiting[: room - at], answer.waiting[room - at :]
        for token_id in taken:
            batch.token[at], batch.pos[at], batch.logits[at] = token_id, answer.num_computed, 0
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, answer.slot
            answer.num_computed += 1
            at += 1
        if not answer.waiting:
            batch.logits[at - 1] = 1
            complete.append((answer, at - 1))
    batch.n_tokens = at
    failure = context.decode(batch)
    native.llama_batch_free(batch)
    if failure:
        raise RuntimeError(f"llama_decode returned {failure} for {at} tokens")
    shape = (context.model.n_vocab,)
    return [
        (answer, int(np.ctypeslib.as_array(context.get_logits(place), shape).argmax())) for answer, place in complete
    ]


if __name__ == "__main__":
    main()
