"""Models with sliding windows or states on a decode node: shared prefixes, failed transfers, several samples."""

from __future__ import annotations

import pytest

from decode_node.commands import TransferFailed
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.session import Granted, KvFailed, SampleStart, SampleTokens
from tests.families.compared import NUM_TOKENS, PREFILL_BLOCK_SIZE, Compared, logprobs_of, push
from tests.families.families import FAMILIES
from tests.families.test_families import needs_kernels
from tests.support.cached_runner import CachedRunner

pytestmark = needs_kernels
NUM_SHARED = 80


@pytest.fixture(scope="module", params=["Gemma 3", "Phi-3", "OLMo Hybrid"])
def compared(request, tmp_path_factory):
    """A model in which some layers have a window, one in which all have, and one in which some have states."""
    return Compared(FAMILIES[request.param], tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def source(compared):
    return CachedRunner(compared.served, block_size=PREFILL_BLOCK_SIZE, num_blocks=128)


def opened(compared, node, prompt):
    group_id = compared._open(node, prompt)
    node.iterate()
    return group_id, node.find(Granted, group_id)[-1]


def pushed(source, node, granted, prompt):
    table = source.table(len(prompt))
    source.prefill(prompt[:-1], table, chunk=11, num_logits=0)
    push(source, table, node, granted, len(prompt) - 1)


def expected(compared, prompt):
    with compared.node(compared.served, num_speculative_tokens=0) as node:
        return compared._answer(node, prompt)


def test_a_transfer_brings_the_window_of_a_prompt_whose_beginning_is_cached(compared, source):
    """The first prompt left only its own last window, which the second one does not see."""
    other = (*compared.prompt[:NUM_SHARED], *range(20, 80))
    with compared.node(compared.served, max_local_prefill_tokens=1, num_speculative_tokens=0) as node:
        group_id, granted = opened(compared, node, compared.prompt)
        pushed(source, node, granted, compared.prompt)
        assert logprobs_of(node.run(), group_id) == compared.plain
        group_id, granted = opened(compared, node, other)
        assert granted.held_prefix_length == NUM_SHARED
        pushed(source, node, granted, other)
        assert logprobs_of(node.run(), group_id) == expected(compared, other)


def test_after_a_failed_transfer_another_one_or_the_node_itself_goes_on(compared, source):
    with compared.node(compared.served, max_local_prefill_tokens=1, num_speculative_tokens=0) as node:
        group_id, granted = opened(compared, node, compared.prompt)
        pushed(source, node, granted, compared.prompt)
        node.run()
        for first, transfer_id in ((20, b""), (21, bytes(range(16)))):
            other = (*compared.prompt[:NUM_SHARED], *range(first, 80))
            group_id, granted = opened(compared, node, other)
            assert granted.held_prefix_length == NUM_SHARED
            node.groups.transfer_failed(TransferFailed(granted.transfer_id, "a test"))
            node.iterate()
            assert node.find(KvFailed, group_id)
            node.retarget(group_id, transfer_id, keeps_received=bool(transfer_id))
            node.iterate()
            if transfer_id:
                again = node.find(Granted, group_id)[-1]
                assert (again.transfer_id, again.held_prefix_length) == (transfer_id, NUM_SHARED)
                pushed(source, node, again, other)
            assert logprobs_of(node.run(), group_id) == expected(compared, other)


def test_samples_of_one_prompt_that_do_not_fit_together_run_in_turn(compared):
    """Forks share blocks, which count as often as they are used. The node has blocks for few sequences."""
    settings = {"kv_cache": KVCacheConfig(num_blocks=128, window_share=0.01), "num_speculative_tokens": 0}
    samples = tuple(map(SampleStart, range(8)))
    answers = []
    for own_settings in ({"num_speculative_tokens": 0}, settings):
        with compared.node(compared.served, max_rows_per_step=16, **own_settings) as node:
            window = node.engine.pool.windows[0]
            group_id = node.open(prompt=compared.prompt, sampling={"temperature": 1.0, "n": 8}, samples=samples)
            node.run(max_turns=9999)
            tokens = {sample: [] for sample in range(8)}
            for event in node.find(SampleTokens, group_id):
                tokens[event.sample] += event.token_ids
            answers.append(tokens)
            num_window_blocks = window.num_blocks
    assert num_window_blocks < 8 * 6
    assert node.num_preempted > 0
    assert answers[0] == answers[1]
    assert {len(answer) for answer in answers[0].values()} == {NUM_TOKENS}


def test_a_node_without_slots_for_more_states_preempts(tmp_path):
    compared = Compared(FAMILIES["OLMo Hybrid"], tmp_path)
    samples = tuple(map(SampleStart, range(4)))
    answers = []
    for state_slots in (64, 5):
        settings = {"kv_cache": KVCacheConfig(num_blocks=128, state_slots=state_slots), "num_speculative_tokens": 0}
        with compared.node(compared.served, **settings) as node:
            group_id = node.open(prompt=compared.prompt, sampling={"temperature": 1.0, "n": 4}, samples=samples)
            node.run(max_turns=9999)
            answers.append([(event.sample, event.token_ids) for event in node.find(SampleTokens, group_id)])
            was_preempted = node.num_preempted > 0
        assert was_preempted == (state_slots == 5)
    by_sample = [{n: [t for sample, ids in each if sample == n for t in ids] for n in range(4)} for each in answers]
    assert by_sample[0] == by_sample[1]
    assert {len(answer) for answer in by_sample[0].values()} == {NUM_TOKENS}
