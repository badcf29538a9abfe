"""Which evicted blocks main memory keeps. Blocks are numbers here, and a slot holds what was copied to it."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache.block_pool import BlockPool, WindowPool
from outrider.engine.kv_cache.copy_price import CopyPrice
from outrider.engine.kv_cache.host_store import COPY_SHARE, MAX_MEASURE_EVERY, MEASURE_EVERY, HostStore
from outrider.engine.kv_cache.sequence_kv import SequenceKV
from tests.support.host_prices import FixedPrice
from tests.support.pool_integrity import check_pool

BLOCK = 4
SLOT_BYTES = 10


class Numbers:
    """BlockCopies of a cache whose blocks are the values in `blocks`."""

    def __init__(self, num_slots, num_groups=1):
        self.num_slots, self.slot_bytes = [num_slots] * num_groups, [SLOT_BYTES] * num_groups
        self.blocks, self._slots, self.measured = {}, {}, []

    def save(self, group, block_id, slot):
        assert 0 <= slot < self.num_slots[group]
        self._slots[group, slot] = self.blocks.get((group, block_id))

    def load(self, group, block_id, slot):
        self.blocks[group, block_id] = self._slots[group, slot]

    def measure(self, group, block_id):
        self.measured.append((group, block_id))


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def make_store(num_slots=3, **price):
    copies = Numbers(num_slots)
    return HostStore(copies, FixedPrice(**price)), copies


def saved(store, *names):
    for name in names:
        store.save(0, [(0, name.encode())])


def present(store, names):
    return "".join(name for name in names if store.has(0, name.encode()))


def test_the_store_is_bounded_and_drops_what_was_loaded_then_what_was_evicted_first():
    store, _ = make_store()
    saved(store, "a", "b", "c")
    assert store.num_bytes == 3 * SLOT_BYTES
    assert store.load(0, 1, b"b")
    saved(store, "d")
    assert present(store, "abcd") == "acd"
    assert not store.load(0, 1, b"b")
    saved(store, "e")
    assert present(store, "acde") == "cde"
    assert (store.num_saved, store.num_dropped, store.num_bytes) == (5, 2, 3 * SLOT_BYTES)


def test_what_is_here_already_is_not_copied_again():
    store, _ = make_store()
    saved(store, "a", "b", "c", "a")
    assert store.num_saved == 3
    saved(store, "d")
    assert present(store, "abcd") == "acd"


def test_content_comes_back():
    store, copies = make_store(num_slots=8)
    for number in range(8):
        copies.blocks[0, number] = f"content {number}"
        store.save(0, [(number, bytes([number]))])
    for number in range(8):
        assert store.load(0, 20, bytes([number]))
        assert copies.blocks[0, 20] == f"content {number}"
    assert store.num_loaded == 8


def test_blocks_of_preempted_sequences_do_not_lose_to_prefixes():
    store, _ = make_store()
    saved(store, "a")
    store.keep(1, [b"a", b"b"])  # a is here already, b follows
    saved(store, "x", "b", "y", "z")
    assert present(store, "abxyz") == "abz"
    store.keep(2, [b"c", b"d"])
    saved(store, "c", "e")  # e would be a prefix, and all slots have blocks of preempted sequences
    assert present(store, "abce") == "abc"
    saved(store, "d")  # a preempted sequence's may take their slots
    assert present(store, "abcd") == "bcd"


def test_a_sequence_that_runs_again_or_ends_leaves_prefixes():
    store, _ = make_store()
    for key in (1, 2):
        store.keep(key, [b"a", b"b"])
    saved(store, "a", "b")
    store.forget(1)
    saved(store, "x", "y")
    assert present(store, "abxy") == "aby"  # the other sequence keeps them
    store.forget(2)
    store.forget(2)
    assert not store._num_keepers
    saved(store, "v")
    assert present(store, "abyv") == "ayv"  # from the end of the sequence on
    saved(store, "w")
    assert present(store, "ayvw") == "yvw"


def test_a_store_slower_than_computing_is_not_used():
    store, copies = make_store(save_pays=False)
    for number in range(3 * MEASURE_EVERY):
        store.save(0, [(number, str(number).encode())])
    assert (store.num_saved, store.num_bytes, store.num_refused) == (0, 0, 3 * MEASURE_EVERY)
    assert copies.measured == [(0, MEASURE_EVERY - 1), (0, 3 * MEASURE_EVERY - 1)]  # so that a better price is seen
    store, _ = make_store()
    saved(store, "a")
    store.price.load_pays = False
    assert not store.has(0, b"a")


def test_measuring_grows_rarer_until_the_price_allows_copies():
    store, copies = make_store(save_pays=False)
    for _ in range(40 * MAX_MEASURE_EVERY):
        saved(store, "a")
    assert 40 < len(copies.measured) < 50
    store.price.save_pays = True
    saved(store, "a")
    store.price.load_pays = False
    before = len(copies.measured)
    for _ in range(MEASURE_EVERY):
        saved(store, "a")
    assert len(copies.measured) == before + 1


def test_prices_of_all_groups_recover():
    """The groups' blocks may come in any pattern, such as one of 16 of the first group."""
    copies = Numbers(3, num_groups=2)
    store = HostStore(copies, FixedPrice(save_pays=False))
    for number in range(16 * MEASURE_EVERY):
        store.save(int(number % 16 != 15), [(number, str(number).encode())])
    assert {group for group, _ in copies.measured} == {0, 1}


def test_a_price_recovers_though_all_evicted_blocks_are_here():
    store, copies = make_store()
    saved(store, "a", "b")
    store.price.load_pays = store.price.save_pays = False
    for _ in range(MEASURE_EVERY // 2):
        saved(store, "a", "b")
    assert len(copies.measured) == 1
    assert store.num_refused == 0  # they are here


def timed_store():
    """Returns a store whose copies take a second each, and computing a full step 10 seconds."""
    copies, clock = Numbers(100), Clock()
    price = CopyPrice(block_size=BLOCK, num_groups=1, max_rows=2 * BLOCK)
    for is_load in (False, True):
        price.add_copy(0, 1.0, is_load=is_load)
    price.add_step(10.0, num_rows=2 * BLOCK, num_prompt_rows=2 * BLOCK)
    return HostStore(copies, price, now=clock), clock


def test_the_time_of_copies_is_bounded():
    store, clock = timed_store()
    for number in range(30):
        store.save(0, [(number, bytes([number]))])
    assert (store.num_saved, store.num_dropped, store.max_loads()) == (10, 20, 0)
    clock.seconds += 4 / COPY_SHARE
    assert store.max_loads() == 4
    assert all(store.load(0, number, bytes([number])) for number in range(3))
    saved(store, "a", "b")
    assert (store.num_saved, store.max_loads()) == (11, 0)
    clock.seconds += 1e9
    assert store.max_loads() == 10


def written(pool, copies, token_ids):
    kv = SequenceKV.create(pool, token_ids, max_cached_tokens=len(token_ids), kept_back=0)
    num_cached = kv.num_tokens
    kv.reserve(len(token_ids))
    for index in range(num_cached // BLOCK, len(token_ids) // BLOCK):
        copies.blocks[0, kv.block_ids[index]] = tuple(token_ids[: (index + 1) * BLOCK])
    kv.advance(len(token_ids))
    kv.publish(token_ids)
    return kv, num_cached


def content(kv, copies):
    return [copies.blocks[0, block_id] for block_id in kv.block_ids]


def test_copies_that_are_slower_than_their_price_count_as_they_are():
    store, clock = timed_store()
    real = store._copies.save

    def slow(*arguments):
        clock.seconds += 4
        real(*arguments)

    store._copies.save = slow
    store.save(0, [(number, bytes([number])) for number in range(30)])
    assert store.num_saved == 4  # 16 seconds, of which 4 are a quarter of the time
    assert present(store, [chr(number) for number in range(30)]) == "".join(map(chr, range(26, 30)))


def test_a_store_smaller_than_a_prefix_has_its_beginning():
    store, _ = make_store()
    store.save(0, [(number, name.encode()) for number, name in enumerate("edcba")])
    assert (present(store, "abcde"), store.num_dropped) == ("abc", 2)
    saved(store, "x")
    assert present(store, "abcx") == "abx"


def test_a_match_ends_where_loading_would_take_too_long():
    pool = BlockPool(num_blocks=16, block_size=BLOCK, hash_seed=b"")
    store, clock = timed_store()
    pool.use_host(store)
    token_ids = list(range(16 * BLOCK))
    written(pool, store._copies, token_ids)[0].free()
    pool.release(pool.allocate(16))
    assert (store.num_saved, store.num_dropped) == (10, 6)  # the end is dropped
    clock.seconds += 6 / COPY_SHARE
    kv, num_cached = written(pool, store._copies, token_ids)
    assert num_cached == 6 * BLOCK
    assert content(kv, store._copies) == [tuple(token_ids[:end]) for end in range(BLOCK, 17 * BLOCK, BLOCK)]
    check_pool(pool, [kv.block_ids])


def pool_with_store(num_blocks=4, num_slots=16, **price):
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK, hash_seed=b"")
    store, copies = make_store(num_slots, **price)
    pool.use_host(store)
    return pool, store, copies


def test_evicted_prefixes_come_back():
    pool, store, copies = pool_with_store()
    first, second = list(range(16)), list(range(50, 66))
    for token_ids in (first, second, first):
        kv, num_cached = written(pool, copies, token_ids)
        assert content(kv, copies) == [tuple(token_ids[:end]) for end in (4, 8, 12, 16)]
        kv.free()
    assert num_cached == 16
    assert (store.num_saved, store.num_loaded) == (8, 4)
    check_pool(pool)


def test_a_prefix_may_be_in_both_places():
    pool, store, copies = pool_with_store()
    token_ids = list(range(16))
    written(pool, copies, token_ids)[0].free()
    others = pool.allocate(2)  # evicts the chain's end
    pool.release(others)
    kv, num_cached = written(pool, copies, token_ids)
    assert num_cached == 16
    assert store.num_loaded == 2
    assert content(kv, copies) == [tuple(token_ids[:end]) for end in (4, 8, 12, 16)]


def window_pool(num_slots):
    pool = WindowPool(window=8, max_step_tokens=8, first_block=4, num_blocks=20, block_size=BLOCK, hash_seed=b"")
    copies = Numbers(num_slots, num_groups=2)
    pool.use_host(HostStore(copies, FixedPrice()), group=1)
    return pool, copies


def publish(pool, copies, *hashes):
    for name in hashes:
        (block_id,) = pool.allocate(1)
        copies.blocks[1, block_id] = name
        pool.register(block_id, name)
        pool.release((block_id,))


def test_a_windows_blocks_come_from_both_places():
    pool, copies = window_pool(num_slots=9)
    publish(pool, copies, b"a", b"b", b"c")
    pool.release(pool.allocate(19))  # evicts a and b
    assert all(map(pool.has, (b"a", b"b", b"c")))
    assert not pool.has(b"d")
    taken = pool.take([b"b", b"c", b"a"])
    assert [copies.blocks[1, block_id] for block_id in taken] == [b"b", b"c", b"a"]
    assert (pool.host.num_loaded, pool.num_free_blocks) == (2, 17)
    pool.release(taken)
    assert pool.num_free_blocks == 20
    check_pool(pool)


def test_of_a_window_that_is_not_whole_nothing_is_taken():
    pool, copies = window_pool(num_slots=1)
    publish(pool, copies, b"a", b"b", b"c")
    pool.release(pool.allocate(20))  # the one slot has c
    assert not pool.has(b"a")
    assert pool.take([b"c", b"a"]) is None
    assert pool.num_free_blocks == 20
    check_pool(pool)


def test_nothing_is_loaded_for_a_sequence_that_has_no_room():
    pool, store, copies = pool_with_store()
    token_ids = list(range(16))
    written(pool, copies, token_ids)[0].free()
    held = pool.allocate(2)
    kv = SequenceKV.create(pool, token_ids, max_cached_tokens=16, kept_back=0)
    assert kv.num_tokens == 8
    assert store.num_loaded == 0
    assert pool.num_free_blocks == 0
    check_pool(pool, [held, kv.block_ids])


def test_nothing_is_loaded_before_a_sequence_is_admitted():
    pool, store, copies = pool_with_store()
    token_ids = list(range(16))
    written(pool, copies, token_ids)[0].free()
    pool.release(pool.allocate(4))
    for kept_back in (None, 1):
        assert SequenceKV.create(pool, token_ids, max_cached_tokens=16, kept_back=kept_back).num_tokens == 0
    assert store.num_loaded == 0
    assert SequenceKV.create(pool, token_ids, max_cached_tokens=16, kept_back=0).num_tokens == 16


def test_nothing_is_loaded_if_the_window_is_gone():
    window = WindowPool(window=8, max_step_tokens=8, first_block=8, num_blocks=8, block_size=BLOCK, hash_seed=b"")
    pool = BlockPool(num_blocks=8, block_size=BLOCK, hash_seed=b"", windows=[window])
    store = HostStore(Numbers(16, num_groups=2), FixedPrice())
    pool.use_host(store)
    token_ids = list(range(16))
    kv = SequenceKV.create(pool, token_ids, max_cached_tokens=0)
    for end in (8, 16):
        kv.reserve(end)
        kv.advance(end)
        kv.publish(token_ids[:end])
    kv.free()
    window.host = None  # the window's blocks are lost
    for each in (pool, window):
        each.release(each.allocate(8))
    window.host = store
    assert SequenceKV.create(pool, token_ids, max_cached_tokens=16, kept_back=0).num_tokens == 0
    assert (store.num_saved, store.num_loaded) == (4, 0)


@pytest.mark.parametrize("refused", ["load_pays", "save_pays"])
def test_what_does_not_pay_is_computed(refused):
    pool, store, copies = pool_with_store(**{refused: False})
    for token_ids in (list(range(16)), list(range(50, 66))):
        written(pool, copies, token_ids)[0].free()
    _, num_cached = written(pool, copies, list(range(16)))
    assert num_cached == 0
    assert store.num_loaded == 0
