"""A decode node whose pool is too small for its sequences: main memory saves computing, and never changes a token."""

from __future__ import annotations

import time

import pytest

from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.engine.kv_cache.host_store import HostStore
from tests.decode_node.tiny_node import generate, tiny_nodes
from tests.support.host_prices import FixedPrice
from tests.support.tiny_model import make_tiny_model

PROMPTS = [tuple((7 * start + 3 * index) % 290 + 3 for index in range(44)) for start in range(4)]
SAMPLING = {"temperature": 1.0, "max_tokens": 120}
ROOMY, TIGHT = 64, 20  # blocks; the sequences need 44
MODELS = {
    "dense": ("llama", {}),
    "windows": ("gemma3_text", {}),
    "windows only": ("mistral", {"sliding_window": 48}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    architecture, overrides = MODELS[request.param]
    path = tmp_path_factory.mktemp("model")
    overrides = {"max_position_embeddings": 256, **overrides}
    return make_tiny_model(path, architecture=architecture, dtype="bfloat16", overrides=overrides)


@pytest.fixture
def make_node(model):
    with tiny_nodes() as make:

        def make_with_pool(num_blocks, host_memory="0", **price):
            kv_cache = KVCacheConfig(num_blocks=num_blocks, host_memory=host_memory, window_share=0.9)
            node = make(model, kv_cache=kv_cache, max_local_prefill_tokens=64, max_rows_per_step=64)
            node.groups._admission.observe_finished = lambda _num_generated: None
            node.groups._admission._mean_output_tokens = 1.0  # so that too many sequences are admitted
            if node.engine.pool.host is not None:
                node.engine.pool.use_host(HostStore(node.engine.pool.host._copies, FixedPrice(**price)))
            return node

        yield make_with_pool


def answers(node):
    groups = [node.open(prompt=prompt, sampling={**SAMPLING, "seed": seed}) for seed, prompt in enumerate(PROMPTS)]
    node.run()
    node.assert_nothing_is_held()
    return [node.tokens(group) for group in groups]


def test_preempted_sequences_are_loaded_instead_of_computed(make_node):
    roomy, plain, node = make_node(ROOMY), make_node(TIGHT), make_node(TIGHT, "4MiB")
    expected = answers(roomy)
    assert answers(plain) == answers(node) == expected
    assert roomy.num_preempted == 0
    assert min(plain.num_preempted, node.num_preempted) > 0
    store = node.engine.pool.host
    assert store.num_loaded > 0
    assert not store._num_keepers
    recomputed, saved = plain.num_rows - roomy.num_rows, plain.num_rows - node.num_rows
    assert saved > 0.7 * recomputed > 100


def test_main_memory_forgets_preempted_sequences_that_are_cancelled(make_node):
    node = make_node(TIGHT, "4MiB")
    groups = [node.open(prompt=prompt, sampling=SAMPLING) for prompt in PROMPTS]
    while not node.num_preempted:
        node.iterate()
    assert node.engine.pool.host._num_keepers
    for group in groups:
        node.cancel(group)
    node.run()
    assert not node.engine.pool.host._num_keepers
    node.assert_nothing_is_held()


def test_a_price_that_forbids_loading_changes_nothing(make_node):
    plain, node = make_node(TIGHT), make_node(TIGHT, "4MiB", save_pays=False)
    assert answers(node) == answers(plain)
    assert node.num_rows == plain.num_rows
    store = node.engine.pool.host
    assert (store.num_saved, store.num_loaded, store.num_bytes) == (0, 0, 0)
    assert store.num_refused > 0


def test_too_little_main_memory_is_bounded_and_changes_nothing(make_node):
    plain, node = make_node(TIGHT), make_node(TIGHT, "96KiB")
    assert answers(node) == answers(plain)
    store = node.engine.pool.host
    assert store.num_dropped > 0
    assert store.num_bytes <= 96 << 10


def test_evicted_prefixes_come_back(make_node):
    node = make_node(TIGHT, "4MiB")
    sampling = {"max_tokens": 4, "temperature": 0.0}
    first = [generate(node, prompt=prompt, sampling=sampling) for prompt in PROMPTS]
    for start in range(4, 12):  # evicts all of them
        generate(node, prompt=tuple(reversed(PROMPTS[start % 4][: 30 + start])), sampling=sampling)
    num_rows, num_loaded = node.num_rows, node.engine.pool.host.num_loaded
    assert [generate(node, prompt=prompt, sampling=sampling) for prompt in PROMPTS] == first
    assert node.engine.pool.host.num_loaded > num_loaded
    num_computed = node.num_rows - num_rows
    assert num_computed == len(PROMPTS) * (len(PROMPTS[0]) % 16 + 3)  # the partial block, and all new tokens but one
    node.assert_nothing_is_held()


def test_prices_are_measured_at_start(model):
    with tiny_nodes() as make:
        node = make(model, kv_cache=KVCacheConfig(num_blocks=ROOMY, host_memory="4MiB"))
        assert "inf" not in str(node.engine.pool.host.price)


def test_only_forwards_are_timed_and_only_those_of_prompts(make_node):
    node = make_node(ROOMY, "4MiB")
    price = node.engine.pool.host.price
    added, in_forward, forward = [], [], node.engine.runner.forward

    def timed_forward(*arguments, **options):
        started = time.perf_counter()
        try:
            return forward(*arguments, **options)
        finally:
            in_forward.append(time.perf_counter() - started)

    price.add_step = lambda seconds, **rows: added.append((seconds, *rows.values()))
    node.engine.runner.forward = timed_forward
    generate(node, prompt=PROMPTS[0], sampling={"max_tokens": 3})
    assert [rows for _, *rows in added] == [[len(PROMPTS[0]), len(PROMPTS[0])], [1, 0], [1, 0]]
    assert all(0 < seconds - inner < 0.5 for (seconds, *_), inner in zip(added, in_forward, strict=True))


def test_a_group_that_is_rejected_loads_nothing(make_node):
    node = make_node(TIGHT, "4MiB")
    for prompt in PROMPTS:
        generate(node, prompt=prompt, sampling={"max_tokens": 1})
    pool, store = node.engine.pool, node.engine.pool.host
    for _ in range(2):
        for each in (pool, *pool.windows):
            each.release(each.allocate(each.num_free_blocks))
    node.groups._reject_if_full = lambda *_: True
    node.open(prompt=PROMPTS[0], sampling={"max_tokens": 1})
    node.iterate()
    assert store.num_loaded == 0
    del node.groups._reject_if_full
    node.open(prompt=PROMPTS[0], sampling={"max_tokens": 1})
    node.run()
    assert store.num_loaded > 0
