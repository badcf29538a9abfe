"""The first use of the sampler's kernels, which compiles them: seconds that no request should wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engine.sampler.sampler import Sampler
from outrider.engine.sampler.sequence_sampling import SampleRows
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams

if TYPE_CHECKING:
    import torch

STEPS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"min_p": 0.1},
    {"top_k": 2},
    {"top_p": 0.9},
    {"top_k": 2, "top_p": 0.9},
    {"logit_bias": ((0, 1.0),), "min_tokens": 1, "repetition_penalty": 1.1, "presence_penalty": 0.1},
)
"""Parameters of one step each: kernels are compiled for what any row of a step asks for."""


def warm_up_sampler(sampler: Sampler, device: torch.device | str) -> None:
    """Decides rows in each of the ways that are compiled. On a CPU nothing is. Constraints read their tokenizer."""
    if sampler.constraints is not None:
        sampler.constraints.warm_up()
    if str(device).startswith("cpu"):
        return
    import torch

    logits = torch.zeros((2, sampler.vocab_size), device=device)
    for step in STEPS:
        for mode in (None, *LogprobsMode):
            state = sampler.start(
                SamplingParams(seed=0, max_tokens=3, **step),
                sample=0,
                prompt_token_ids=(0,),
                stop_token_ids=(0,),
                logprobs=None if mode is None else LogprobsRequest(num_top=1, mode=mode),
            )
            sampler.sample(logits, [SampleRows(state, 1, (0,))])  # of which the second follows a draft token
