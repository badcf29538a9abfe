import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.placement import Placement, place_roles


def test_few_processors_are_shared_by_all():
    everything = Placement((0, 1), 2, is_shared=True)
    assert place_roles(ClusterConfig(), [0, 1]) == {"decode-0": everything, "prefill-0": everything}


def test_many_are_divided_and_one_stays_free():
    places = place_roles(ClusterConfig(), list(range(16)))
    assert places["decode-0"] == Placement(tuple(range(1, 9)), 8)
    assert places["prefill-0"] == Placement(tuple(range(9, 16)), 7)


@pytest.mark.parametrize("num_cpus", [1, 2, 5, 6, 7, 8, 12, 16, 64])
@pytest.mark.parametrize("draft", ["ngram", "none", "draft_model:x"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1), (3, 2, 2), (1, 4, 1)])
def test_everyone_computes_somewhere_and_nobody_elsewhere(num_cpus, draft, counts):
    decode, prefill, drafts = counts
    config = ClusterConfig(decode_nodes=decode, prefill_nodes=prefill, draft_nodes=drafts, draft=draft)
    cpus = list(range(3, 3 + num_cpus))
    places = place_roles(config, cpus)
    assert len(places) == decode + prefill + (drafts if draft.startswith("draft_model") else 0)
    for place in places.values():
        assert place.cpus
        assert place.num_threads == len(place.cpus)
        assert set(place.cpus) <= set(cpus)
    used = [cpu for place in places.values() for cpu in place.cpus]
    is_shared = all(place.cpus == tuple(cpus) for place in places.values())
    assert {place.is_shared for place in places.values()} == {is_shared}
    assert is_shared or (len(used) == len(set(used)) and cpus[0] not in used)
