"""How much memory there is, read from made-up machines with both layouts of control groups."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from hicache import memory
from hicache.memory import Room, room

MIB = 1 << 20


class Machine:
    """Folders that look like /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path, available: int = 1000 * MIB, groups: str = "0::/\n") -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\nSwapFree: 0 kB\n")
        (self.proc / "self" / "cgroup").write_text(groups)

    def group(self, path: str, **files: object) -> Path:
        """A group's files; `__` in a name stands for a dot."""
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")
        return folder

    def room(self) -> Room:
        return room(self.proc, self.cgroup)


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.room() == (1000 * MIB, "MemAvailable")
    machine.group("", memory__max="max", memory__current=5)
    assert machine.room() == (1000 * MIB, "MemAvailable")


def test_a_containers_limit_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    folder = machine.group("", memory__max=300 * MIB, memory__current=100 * MIB)
    assert machine.room() == (200 * MIB, str(folder / "memory.max"))
    machine.group("", memory__stat=f"anon 1\ninactive_file {30 * MIB}\nactive_file 7")
    assert machine.room().available == 230 * MIB


def test_the_tightest_group_up_to_the_root_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="0::/outer/inner\n")
    machine.group("outer/inner", memory__max=500 * MIB, memory__current=0)
    outer = machine.group("outer", memory__max=600 * MIB, memory__current=350 * MIB)
    assert machine.room() == (250 * MIB, str(outer / "memory.max"))


def test_the_older_layout(tmp_path: Path) -> None:
    machine = Machine(tmp_path, groups="9:name=systemd:/x\n4:cpu,memory:/box/a\n0::/\n")
    unlimited = 0x7FFFFFFFFFFFF000
    machine.group("memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=5)
    machine.group("memory/box", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=100 * MIB)
    assert machine.room().available == 300 * MIB
    machine.group("memory/box", memory__stat=f"total_inactive_file {MIB}")
    assert machine.room().available == 301 * MIB


def test_more_used_than_allowed_is_no_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.group("", memory__max=100, memory__current=200)
    assert machine.room().available == 0


def test_no_groups_at_all(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.room().source == "MemAvailable"


def test_this_machine_has_some() -> None:
    found = room()
    assert 0 < found.available < 1 << 50


def test_the_limit_of_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert memory.memlock_limit() == (sys.maxsize if soft == resource.RLIM_INFINITY else soft)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory.memlock_limit() == sys.maxsize
