import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.shares import divide_cpus


def test_few_processors_are_shared_by_all():
    assert divide_cpus(ClusterConfig(), [0, 1]) == {"decode-0": (0, 1), "prefill-0": (0, 1)}


def test_many_are_divided_and_one_stays_free():
    shares = divide_cpus(ClusterConfig(), list(range(16)))
    assert shares["decode-0"] == tuple(range(1, 9))
    assert shares["prefill-0"] == tuple(range(9, 16))


@pytest.mark.parametrize("num_cpus", [1, 2, 5, 6, 7, 8, 12, 16, 64])
@pytest.mark.parametrize("draft", ["ngram", "none", "draft_model:x"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1), (3, 2, 2), (1, 4, 1), (2, 0, 1)])
def test_everyone_computes_somewhere_and_nobody_elsewhere(num_cpus, draft, counts):
    decode, prefill, drafts = counts
    config = ClusterConfig(decode_nodes=decode, prefill_nodes=prefill, draft_nodes=drafts, draft=draft)
    cpus = list(range(3, 3 + num_cpus))
    shares = divide_cpus(config, cpus)
    assert len(shares) == decode + prefill + (drafts if draft.startswith("draft_model") else 0)
    for share in shares.values():
        assert share
        assert set(share) <= set(cpus)
    used = [cpu for share in shares.values() for cpu in share]
    is_shared = all(share == tuple(cpus) for share in shares.values())
    assert is_shared or sorted(used) == cpus[1:]
