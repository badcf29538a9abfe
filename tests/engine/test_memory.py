"""What a control group leaves of the machine's memory, from files as the kernel writes them."""

from __future__ import annotations

import psutil
import pytest

from outrider.engine.memory import free_main_memory_bytes

MIB = 2**20
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
UNLIMITED = {1: "9223372036854771712", 2: "max"}


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def machine(request, tmp_path):
    """The control groups of one machine, of either version; `add(group, …)`, `free(member of group)`."""

    class Machine:
        version = request.param
        root = tmp_path / "memory" if request.param == 1 else tmp_path

        def add(self, group, *, limit, used, cache=0, active=0):
            folder = self.root / group
            folder.mkdir(parents=True, exist_ok=True)
            limit_file, usage_file, prefix = FILES[self.version]
            (folder / limit_file).write_text(f"{limit}\n")
            (folder / usage_file).write_text(f"{used}\n")
            files = f"{prefix}inactive_file {cache}\n{prefix}active_file {active}\n"
            (folder / "memory.stat").write_text(f"anon 1\n{files}active_anon 2\n")

        def free(self, group, *, mapped=0):
            membership = tmp_path / "membership"
            other = "12:cpu,cpuacct:/elsewhere\n"
            membership.write_text(other + (f"4:memory:/{group}\n" if self.version == 1 else f"0::/{group}\n"))
            return free_main_memory_bytes(groups=tmp_path, membership=membership, mapped_bytes=mapped)

    return Machine()


def available():
    return pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_limit_leaves_what_is_not_used_and_what_files_only_borrow(machine):
    machine.add("docker/abc", limit=300 * MIB, used=200 * MIB, cache=50 * MIB)
    assert machine.free("docker/abc") == 150 * MIB


def test_pages_of_files_that_this_process_maps_are_not_free(machine):
    machine.add("a", limit=900 * MIB, used=600 * MIB, cache=400 * MIB, active=100 * MIB)
    assert machine.free("a", mapped=100 * MIB) == 700 * MIB  # they may all be among the active ones
    assert machine.free("a", mapped=350 * MIB) == 450 * MIB
    assert machine.free("a", mapped=800 * MIB) == 300 * MIB
    machine.add("b", limit=UNLIMITED[machine.version], used=0)
    all_of_it = psutil.virtual_memory().available
    assert machine.free("b", mapped=all_of_it // 2) == pytest.approx(all_of_it / 2, rel=0.2)


def test_a_container_whose_group_is_the_root_is_within_its_limit(machine):
    machine.add("", limit=100 * MIB, used=30 * MIB)
    assert machine.free("docker/a-name-of-the-host") == 70 * MIB
    assert machine.free("") == 70 * MIB


def test_the_narrowest_group_above_counts(machine):
    machine.add("", limit=UNLIMITED[machine.version], used=3000 * MIB)
    machine.add("pod", limit=100 * MIB, used=60 * MIB)
    machine.add("pod/container", limit=90 * MIB, used=10 * MIB)
    assert machine.free("pod/container") == 40 * MIB


def test_no_limit_leaves_what_the_machine_has(machine):
    machine.add("", limit=UNLIMITED[machine.version], used=3000 * MIB)
    assert machine.free("") == available()
    assert machine.free("not/there") == available()


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine.add("", limit=10 * MIB, used=11 * MIB)
    assert machine.free("") == 0


def test_a_system_without_control_groups_leaves_what_the_machine_has(tmp_path):
    assert free_main_memory_bytes(groups=tmp_path, membership=tmp_path / "none") == available()
