"""Models with recurrent states: what a prefill node pushes, and long chains of drafts."""

from __future__ import annotations

import queue
import threading

import pytest

from outrider.engine.attention import make_attention_backend
from outrider.engine.engine import PromptEngine
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.make_pool import make_pool
from outrider.engine.memory import KVMemory, pool_size
from outrider.engine.model_runner import make_runner
from outrider.engine.scheduler import Scheduler
from outrider.engine.step_profiler import StepProfiler
from outrider.prefill import PrefillFigures
from outrider.session import Granted
from prefill_node.jobs import Stop
from prefill_node.prefill_loop import PrefillLoop
from tests.families.compared import PREFILL_BLOCK_SIZE, Compared, logprobs_of
from tests.families.families import FAMILIES, VOCAB_SIZE
from tests.families.test_families import needs_kernels
from tests.prefill_node.conftest import job_of
from tests.support.fake_drafts import TextDrafts
from tests.support.in_memory_connector import InMemoryConnector
from tests.support.pool_integrity import check_pool
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = needs_kernels
CHUNK = 24


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return Compared(FAMILIES["Qwen 3.5"], tmp_path_factory.mktemp("family"))


def prefill_parts(model):
    """Returns the engine of a prefill node with slots for few states."""
    config = KVCacheConfig(num_blocks=256, block_size=PREFILL_BLOCK_SIZE, state_slots=7)
    size = pool_size(model.spec, config, KVMemory(free_bytes=0, whole_bytes=0), max_step_tokens=CHUNK)
    cache = model.make_cache(size.num_blocks, config.block_size, size.window_blocks, size.state_slots)
    pool = make_pool(cache, hash_seed=b"seed", max_step_tokens=CHUNK)
    scheduler = Scheduler(pool, max_running=2, max_rows_per_step=CHUNK, reserve_blocks_per_running=0)
    return PromptEngine(pool, scheduler, cache, make_runner(model, cache, make_attention_backend("auto", model.device)))


def test_answers_after_a_hand_off_are_those_of_one_node(compared):
    engine, ended = prefill_parts(compared.served), queue.SimpleQueue()
    prompts = [compared.prompt, (*compared.prompt[:70], *range(20, 80)), compared.prompt, compared.prompt[:12]]
    with compared.node(compared.served, max_local_prefill_tokens=1, num_speculative_tokens=0) as node:
        address = node.parts.ingest.address("")
        loop = PrefillLoop(
            engine=engine,
            connector=InMemoryConnector({address: node.parts.ingest.inbox}, max_frame_bytes=4096),  # half a state
            frame_bytes=4096,
            profiler=StepProfiler(engine.clock, engine.runner.phases),
            emit=lambda ends, _stats: [ended.put(end.result) for end in ends],
        )
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            num_cached = []
            for number, prompt in enumerate(prompts):
                group_id = compared._open(node, prompt)
                node.iterate()
                granted = node.find(Granted, group_id)[-1]
                incarnation = node.parts.ingest.inbox.incarnation
                where = {"transfer_id": granted.transfer_id, "address": address, "incarnation": incarnation}
                loop.submit(job_of(number, prompt[:-1], held=granted.held_prefix_length, **where))
                figures = ended.get(timeout=PATIENCE_SECONDS)
                assert isinstance(figures, PrefillFigures), figures
                num_cached.append(figures.num_cached_tokens)
                found = logprobs_of(node.run(), group_id)
                with compared.node(compared.served, num_speculative_tokens=0) as alone:
                    assert found == compared._answer(alone, prompt)
        finally:
            loop.submit(Stop())
            thread.join(PATIENCE_SECONDS)
    assert num_cached == [0, 64, 80, 0]
    for pool in (engine.pool, *engine.pool.windows[1:]):
        check_pool(pool, [])


def test_long_chains_of_drafts_change_no_answer(compared):
    """Of up to 24 drafts, more than an interval of states, the first 20 are right, and sometimes none is."""
    text = [*compared.prompt, *(each.token_id for each in compared.plain)]

    def chain(known, num_wanted):
        right = text[len(known) : len(known) + num_wanted]
        first_wrong = 20 if len(known) % 3 else 0
        return [(token_id + (at >= first_wrong)) % VOCAB_SIZE for at, token_id in enumerate(right)]

    with compared.node(compared.served, num_speculative_tokens=24) as node:
        node.loop._drafts._client = TextDrafts(chain)
        assert compared._answer(node, compared.prompt) == compared.plain
        assert node.num_accepted > 2 * 16
        assert node.num_drafted > node.num_accepted
