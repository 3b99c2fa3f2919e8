"""Anonymous shared memory: a sealed memfd, mapped here and, through an inherited descriptor, in another process.

Promises: no name anywhere, so nothing is left behind whatever dies; the size is sealed, so the other side cannot
shrink the file and turn our reads into bus errors. Pages cost memory only once touched.
Descriptors are close-on-exec: a child gets one only where `pass_fds` names it. A `SegmentFile` can be handed on
before anyone knows how large its segment will be.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

from ipc.errors import SegmentError

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _empty_file(label: str) -> int:
    return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _sealed_file(size: int, label: str) -> int:
    fd = _empty_file(label)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Segment:
    """`size` bytes shared by everyone who has the descriptor."""

    def __init__(self, fd: int, size: int, *, owner: bool) -> None:
        """Map `fd`; an owner also closes it in the end. Raises OSError."""
        self.fd = fd
        self.size = size
        self._owner = owner
        self._map = mmap.mmap(fd, size)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size: int, label: str = "deepinfer") -> Segment:
        """A new segment of zeros; `label` shows in /proc/PID/maps only. Raises SegmentError."""
        if size <= 0:
            raise SegmentError(f"a segment cannot have {size} bytes")
        try:
            fd = _sealed_file(size, label)
        except OSError as error:
            raise SegmentError(f"cannot make a segment of {size} bytes: {error}") from error
        try:
            return cls(fd, size, owner=True)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"cannot map the segment of {size} bytes at fd {fd}: {error}") from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """The segment behind an inherited descriptor, which stays the caller's. Raises SegmentError."""
        try:
            found = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise SegmentError(f"fd {fd} is no segment of {size} bytes: {error}") from error
        if found != size:
            raise SegmentError(f"the segment at fd {fd} has {found} bytes instead of {size}")
        if seals & _SIZE_SEALS != _SIZE_SEALS:
            raise SegmentError(f"the size of the segment at fd {fd} ({size} bytes) is not sealed")
        try:
            return cls(fd, size, owner=False)
        except OSError as error:
            raise SegmentError(f"cannot map the segment of {size} bytes at fd {fd}: {error}") from error

    def prefer_huge_pages(self) -> None:
        """Ask for 2 MiB pages where the system gives them for the asking: fewer faults, faster pinning."""
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap, and close an owned descriptor. Every view of `memory` must be released before (BufferError)."""
        self.memory.release()
        self._map.close()
        if self._owner:
            self._owner = False
            os.close(self.fd)


class SegmentFile:
    """A segment to be: its descriptor is there at once, its size comes later and then never changes."""

    def __init__(self, label: str = "deepinfer") -> None:
        """An empty file without a name. Raises SegmentError."""
        try:
            self.fd = _empty_file(label)
        except OSError as error:
            raise SegmentError(f"cannot make the file of a segment ({label}): {error}") from error
        self._open = True

    def fix(self, size: int) -> Segment:
        """Give it its size, once, and map it; the descriptor stays with this object. Raises SegmentError."""
        if size <= 0:
            raise SegmentError(f"a segment cannot have {size} bytes")
        try:
            os.ftruncate(self.fd, size)
            segment = self._mapped(size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            raise SegmentError(f"cannot give the segment at fd {self.fd} {size} bytes: {error}") from error
        return segment

    def _mapped(self, size: int) -> Segment:
        """Before it is sealed, so that a size that cannot be mapped can be taken back."""
        try:
            return Segment(self.fd, size, owner=False)
        except OSError:
            os.ftruncate(self.fd, 0)
            raise

    def close(self) -> None:
        """Close the descriptor; mappings stay. Closing twice is nothing."""
        if self._open:
            self._open = False
            os.close(self.fd)
