"""Segments: nameless, sealed, private to those who were handed the descriptor."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.errors import SegmentError
from ipc.segment import Segment, SegmentFile


def test_both_sides_see_the_same_bytes() -> None:
    owner = Segment.create(8192)
    other = Segment.attach(owner.fd, 8192)
    assert bytes(other.memory) == bytes(8192)
    owner.memory[100:105] = b"hello"
    assert bytes(other.memory[100:105]) == b"hello"
    other.close()
    owner.memory[0] = 1
    owner.close()


def test_a_segment_has_no_name() -> None:
    segment = Segment.create(4096, "nameless")
    assert os.fstat(segment.fd).st_nlink == 0
    assert str(Path(f"/proc/self/fd/{segment.fd}").readlink()) == "/memfd:nameless (deleted)"
    assert not [name for name in Path("/dev/shm").iterdir() if "nameless" in name.name]
    segment.close()


def test_untouched_pages_cost_nothing() -> None:
    segment = Segment.create(1 << 30)
    segment.memory[123] = 1
    assert os.fstat(segment.fd).st_blocks * 512 <= 4 * mmap.PAGESIZE
    segment.close()


def test_the_size_is_sealed() -> None:
    segment = Segment.create(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close()


def test_children_inherit_only_what_is_passed() -> None:
    segment = Segment.create(4096)
    program = f"import os; os.fstat({segment.fd})"
    for fds, code in (((), 1), ((segment.fd,), 0)):
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, pass_fds=fds, check=False, stderr=subprocess.DEVNULL, close_fds=bool(fds))
        assert result.returncode == code
    segment.close()


def test_sizes_must_agree_and_be_possible() -> None:
    segment = Segment.create(4096)
    with pytest.raises(SegmentError, match=rf"fd {segment.fd} has 4096 bytes instead of 8192"):
        Segment.attach(segment.fd, 8192)
    segment.close()
    for size in (0, -1):
        with pytest.raises(SegmentError, match=f"cannot have {size} bytes"):
            Segment.create(size)
    with pytest.raises(SegmentError, match=f"{1 << 62} bytes"):
        Segment.create(1 << 62)


def test_a_descriptor_must_be_a_sealed_segment(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(4096)
        with pytest.raises(SegmentError, match=f"fd {file.fileno()} "):
            Segment.attach(file.fileno(), 4096)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(SegmentError, match="not sealed"):
        Segment.attach(unsealed, 4096)
    os.close(unsealed)
    with pytest.raises(SegmentError, match=f"fd {unsealed} is no segment of 4096 bytes"):
        Segment.attach(unsealed, 4096)


def test_closing_waits_for_views() -> None:
    segment = Segment.create(4096)
    view = segment.memory[:10]
    with pytest.raises(BufferError):
        segment.close()
    view.release()
    segment.close()
    segment.close()


def test_a_size_can_come_after_the_descriptor() -> None:
    file = SegmentFile("later")
    assert os.fstat(file.fd).st_size == 0
    assert str(Path(f"/proc/self/fd/{file.fd}").readlink()) == "/memfd:later (deleted)"
    owner = file.fix(8192)
    other = Segment.attach(file.fd, 8192)
    owner.memory[8000] = 7
    assert other.memory[8000] == 7
    for segment in (owner, other):
        segment.close()
    os.fstat(file.fd)  # the descriptor is the file's, for whoever attaches next
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


def test_a_size_is_given_once_and_then_sealed() -> None:
    file = SegmentFile()
    with pytest.raises(SegmentError, match=f"fd {file.fd} has 0 bytes instead of 4096"):
        Segment.attach(file.fd, 4096)
    for size in (0, -1):
        with pytest.raises(SegmentError, match=f"cannot have {size} bytes"):
            file.fix(size)
    file.fix(4096).close()
    with pytest.raises(SegmentError, match=f"cannot give the segment at fd {file.fd} 8192 bytes"):
        file.fix(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 0)
    file.close()


def test_an_impossible_size_leaves_the_file_as_it_was() -> None:
    file = SegmentFile()
    with pytest.raises(SegmentError, match=f"{1 << 62} bytes"):
        file.fix(1 << 62)
    file.fix(4096).close()
    file.close()


def test_huge_pages_are_a_wish() -> None:
    segment = Segment.create(4 << 20)
    segment.prefer_huge_pages()
    segment.memory[-1] = 1
    assert bytes(segment.memory[-2:]) == b"\0\1"
    segment.close()
