"""How much memory can still be had: what the machine has, within the limits of this process's control groups.

Reads /proc and /sys/fs/cgroup only; both layouts of control groups, and every group up to the root. Knows nothing
about pools.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """Bytes that can be had without swapping, and which limit says so."""

    available: int
    source: str


class _Layout(NamedTuple):
    """File names of one version of control groups."""

    limit: str
    used: str
    cache: str  # field of memory.stat: file pages that go as soon as somebody needs the memory


_V2: Final = _Layout("memory.max", "memory.current", "inactive_file")
_V1: Final = _Layout("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def room(proc: Path = PROC, cgroup: Path = CGROUP) -> Room:
    """The tightest of MemAvailable and the limits of all groups of this process. Raises OSError without /proc."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    found = [Room(int(fields["MemAvailable"].split()[0]) * 1024, "MemAvailable")]
    for folder, layout in _groups(proc, cgroup):
        found += _room_of(folder, layout)
    tightest = min(found)
    return tightest._replace(available=max(0, tightest.available))


def memlock_limit() -> int:
    """RLIMIT_MEMLOCK of this process, which its children inherit, in bytes; without a limit the largest integer."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Layout]]:
    """Folders of the groups that bound this process, up to the root of what is mounted."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        # A container sees its own group at the root of the mount while the path may be the one of the host.
        ancestors = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        if not controllers:
            yield from ((cgroup / ancestor, _V2) for ancestor in ancestors)
        elif "memory" in controllers.split(","):
            yield from ((cgroup / "memory" / ancestor, _V1) for ancestor in ancestors)


def _room_of(folder: Path, layout: _Layout) -> list[Room]:
    """What one group leaves; nothing where it sets no limit or is not to be seen."""
    try:
        limit = (folder / layout.limit).read_text().strip()
        if limit == "max":
            return []
        used = int((folder / layout.used).read_text())
    except OSError:
        return []
    return [Room(int(limit) - used + _cache(folder, layout), str(folder / layout.limit))]


def _cache(folder: Path, layout: _Layout) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(" ", 1) for line in lines).get(layout.cache, 0))
