"""If native kernels compute a step's logits, tokens are decided and drafts verified without torch."""

from __future__ import annotations

import pytest

from outrider.engine.cpu_kernels.paths import choose_kernels
from tests.support.processes import run_python

PROGRAM = """
import sys
import numpy as np
from outrider.engine.cpu_kernels.kernels import CpuKernels
from outrider.engine.cpu_kernels.library import KernelLibrary
from outrider.engine.pending import read
from outrider.engine.sampler import Sampler, SampleRows
from outrider.engine.sampler.logprobs import pending_prompt_logprobs
from outrider.request import LogprobsMode, LogprobsRequest, SamplingParams, VerificationMethod
from outrider.speculation.token_distribution import TokenDistribution
from outrider.speculation.verify.base import DraftRows
from outrider.speculation.verify.by_request import RequestVerifier

library = KernelLibrary(sys.argv[1])
known = np.arange(300) != 7
sampler = Sampler(vocab_size=300, known_token_ids=known, kernels=CpuKernels(library, 1))
sampler.warm_up()
settings = {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "min_tokens": 9, "logit_bias": ((3, 1.0),)}
drafts = []
for method in VerificationMethod:
    for mode in LogprobsMode:
        params = SamplingParams(seed=1, max_tokens=99, **settings)
        wanted = LogprobsRequest(num_top=5, mode=mode)
        state = sampler.start(params, sample=0, prompt_token_ids=[1], stop_token_ids=[2], logprobs=wanted)
        drawn_from = TokenDistribution((4, 5), (0.5, 0.5))
        drafts.append(DraftRows(SampleRows(state, 5, (4, 5)), (drawn_from, drawn_from), method))
tree = drafts[0]._replace(distributions=(), parents=(-1, -1))
logits = np.random.default_rng(0).standard_normal((3 * (len(drafts) + 1), 300)).astype(np.float32)
pending = RequestVerifier(sampler).queue(logits, [*drafts, tree])
verified, scores = read(pending, pending_prompt_logprobs(logits, range(len(logits)), 5))
assert len(scores) == len(logits)
assert all(outcome.token_ids and outcome.logprobs[0].top for outcome in verified)
{more}
print(*sys.modules)
"""


@pytest.mark.parametrize(("more", "expected"), [("", set()), ("import torch", {"torch"})], ids=["step", "control"])
def test_a_step_of_native_kernels_imports_no_torch(more, expected):
    """The step includes every verification method, a draft tree, and logprobs of tokens and of the prompt."""
    choice = choose_kernels()
    if choice.library is None:
        pytest.skip(str(choice))
    shown = run_python("-c", PROGRAM.replace("{more}", more), choice.library)
    assert shown.returncode == 0, shown.stderr
    assert {"torch", "array_api_compat"} & set(shown.stdout.split()) == expected
