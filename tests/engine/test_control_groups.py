"""How much memory and processor time control groups leave, according to files as the kernel writes them."""

from __future__ import annotations

import psutil
import pytest

from outrider.engine import processor
from outrider.engine.control_groups import cpu_quota
from outrider.engine.memory import free_main_memory_bytes

MIB = 2**20


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def machine(request, tmp_path):
    """The control groups of one machine, in version 1 or 2."""

    class Machine:
        version = request.param

        def add(self, controller, group, **files):
            folder = (tmp_path / controller if self.version == 1 else tmp_path) / group
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / f"{controller}.{name}").write_text(f"{text}\n")

        def add_memory(self, group, *, used, limit=None, cache=0, active=0):
            """Writes a group's memory files. `limit` None: the group has no limit."""
            if self.version == 1:
                limits = {"limit_in_bytes": 2**63 - 4096 if limit is None else limit, "usage_in_bytes": used}
            else:
                limits = {"max": "max" if limit is None else limit, "current": used}
            prefix = "total_" if self.version == 1 else ""
            files = f"{prefix}inactive_file {cache}\n{prefix}active_file {active}\n"
            self.add("memory", group, **limits, stat=f"anon 1\n{files}active_anon 2")

        def add_cpu(self, group, quota, period):
            """Writes a group's processor files. `quota` None: the group has no quota."""
            if self.version == 1:
                self.add("cpu", group, cfs_quota_us=-1 if quota is None else quota, cfs_period_us=period)
            else:
                self.add("cpu", group, max=f"{'max' if quota is None else quota} {period}")

        def _places(self, member):
            lines = [f"0::/{member}"]
            if self.version == 1:
                lines = ["5:pids:/elsewhere", f"4:memory:/{member}", f"3:cpu,cpuacct:/{member}"]
            (tmp_path / "membership").write_text("".join(f"{line}\n" for line in lines))
            return {"groups": tmp_path, "membership": tmp_path / "membership"}

        def free(self, member, *, mapped=0):
            return free_main_memory_bytes(**self._places(member), mapped_bytes=mapped)

        def quota(self, member):
            return cpu_quota(**self._places(member))

    return Machine()


def available():
    return pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_limit_leaves_what_is_not_used_and_what_files_only_borrow(machine):
    machine.add_memory("docker/abc", limit=300 * MIB, used=200 * MIB, cache=50 * MIB)
    assert machine.free("docker/abc") == 150 * MIB


def test_pages_of_files_that_this_process_maps_are_not_free(machine):
    machine.add_memory("a", limit=900 * MIB, used=600 * MIB, cache=400 * MIB, active=100 * MIB)
    assert machine.free("a", mapped=100 * MIB) == 700 * MIB  # all mapped pages may be active
    assert machine.free("a", mapped=350 * MIB) == 450 * MIB
    assert machine.free("a", mapped=800 * MIB) == 300 * MIB
    machine.add_memory("b", used=0)
    all_of_it = psutil.virtual_memory().available
    assert machine.free("b", mapped=all_of_it // 2) == pytest.approx(all_of_it / 2, rel=0.2)


def test_a_container_whose_group_is_the_root_is_within_its_limits(machine):
    machine.add_memory("", limit=100 * MIB, used=30 * MIB)
    machine.add_cpu("", 200_000, 100_000)
    for member in ("docker/a-name-of-the-host", ""):
        assert (machine.free(member), machine.quota(member)) == (70 * MIB, 2)


def test_the_narrowest_group_above_counts(machine):
    machine.add_memory("", used=3000 * MIB)
    machine.add_memory("pod", limit=100 * MIB, used=60 * MIB)
    machine.add_memory("pod/container", limit=90 * MIB, used=10 * MIB)
    assert machine.free("pod/container") == 40 * MIB


def test_no_limit_leaves_what_the_machine_has(machine):
    machine.add_memory("", used=3000 * MIB)
    for member in ("", "not/there"):
        assert machine.free(member) == available()


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine.add_memory("", limit=10 * MIB, used=11 * MIB)
    assert machine.free("") == 0


def test_a_system_without_control_groups_leaves_what_the_machine_has(tmp_path):
    assert free_main_memory_bytes(groups=tmp_path, membership=tmp_path / "none") == available()


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
def test_the_strictest_group_bounds_the_processors(machine, bounds, processors):
    for group, bound in bounds.items():
        machine.add_cpu(group, *bound)
    assert machine.quota("a/b") == processors


def test_threads_are_counted_by_the_quota_and_processors_are_not_chosen(monkeypatch):
    monkeypatch.setattr(processor, "cpu_quota", lambda: 2)
    assert processor.within_quota([4, 5, 6, 7]) == [4, 5]
    assert processor.within_quota((4,)) == [4]
    monkeypatch.setattr(processor, "cpu_quota", lambda: None)
    assert processor.within_quota([4, 5, 6, 7]) == [4, 5, 6, 7]
