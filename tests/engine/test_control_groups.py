"""How many processors a control group's quota is worth, from files as the kernel writes them."""

from __future__ import annotations

import pytest

from outrider.engine import processor
from outrider.engine.control_groups import cpu_quota


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def quota_of(request, tmp_path):
    """`quota_of({group: (quota, period)})`: of a process in a/b; quota None: no bound."""

    def write(bounds, member="a/b"):
        for group, (quota, period) in bounds.items():
            folder = (tmp_path / "cpu" if request.param == 1 else tmp_path) / group
            folder.mkdir(parents=True, exist_ok=True)
            if request.param == 1:
                (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
                (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
            else:
                (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}\n")
        membership = tmp_path / "membership"
        other = "4:memory:/elsewhere\n"
        membership.write_text(other + (f"3:cpu,cpuacct:/{member}\n" if request.param == 1 else f"0::/{member}\n"))
        return cpu_quota(groups=tmp_path, membership=membership)

    return write


@pytest.mark.parametrize(
    ("bounds", "processors"),
    [
        ({}, None),
        ({"a/b": (None, 100_000)}, None),
        ({"a/b": (200_000, 100_000)}, 2),
        ({"a/b": (390_000, 100_000)}, 3),
        ({"a/b": (50_000, 100_000)}, 1),
        ({"a": (200_000, 50_000), "a/b": (None, 100_000)}, 4),
        ({"": (300_000, 100_000), "a/b": (600_000, 100_000)}, 3),
    ],
)
def test_the_strictest_group_bounds_the_processors(quota_of, bounds, processors):
    assert quota_of(bounds) == processors


def test_a_container_that_sees_its_group_as_the_root_finds_its_bound(quota_of):
    assert quota_of({"": (200_000, 100_000)}, member="docker/of/the/host") == 2


def test_threads_are_counted_by_the_quota_and_processors_are_not_chosen(monkeypatch):
    monkeypatch.setattr(processor, "cpu_quota", lambda: 2)
    assert processor.within_quota([4, 5, 6, 7]) == [4, 5]
    assert processor.within_quota((4,)) == [4]
    monkeypatch.setattr(processor, "cpu_quota", lambda: None)
    assert processor.within_quota([4, 5, 6, 7]) == [4, 5, 6, 7]
