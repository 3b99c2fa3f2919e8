"""The CUDA kernel without a card: run on the CPU by a small stand-in for the runtime, and compiled by nvcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import cpp_extension

from tests.ipc_twins import ROOT
from tests.test_ipc_build import COMPILER, needs_compiler

NVCC = shutil.which("nvcc") or "no nvcc"
INVALID = 1  # cudaErrorInvalidValue
TILE = 16 << 10  # what one block of threads copies at a time

UInt8 = npt.NDArray[np.uint8]
Launch = Callable[..., int]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`deepinfer_page_copy_launch` of csrc/page_copy.cu, on this processor."""
    if "/" not in COMPILER:
        pytest.skip(COMPILER)
    out = tmp_path_factory.mktemp("kernel") / "page_copy.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    command = [COMPILER, *flags, "-Itests/cuda_on_cpu", "-x", "c++", "csrc/page_copy.cu", "-o", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    function = ctypes.CDLL(str(out)).deepinfer_page_copy_launch
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_int, pointer]
    found: Launch = function
    return found


def aligned(count: int, size: int, seed: int) -> UInt8:
    """Noise [count, size] at a multiple of 16."""
    memory = np.random.default_rng(seed).integers(0, 256, count * size + 16, dtype=np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + count * size].reshape(count, size)


def run(launch: Launch, dst: UInt8, to: list[int], src: UInt8, at: list[int], *, grid: int) -> int:
    lists = np.array([to, at], np.uint32)
    return launch(
        dst.ctypes.data, lists[0].ctypes.data, src.ctypes.data, lists[1].ctypes.data,
        len(to), dst.shape[1], grid, None,
    )  # fmt: skip


@settings(max_examples=40)
@given(
    to=st.permutations(range(7)),
    at=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    count=st.integers(0, 7),
    size=st.sampled_from([16, 48, 4096, TILE - 16, TILE, TILE + 16, 3 * TILE + 4080]),
    grid=st.integers(1, 40),
)
def test_it_copies_what_numpy_copies(
    launch: Launch, to: list[int], at: list[int], *, count: int, size: int, grid: int
) -> None:
    dst, src = aligned(7, size, 1), aligned(5, size, 2)
    expected = dst.copy()
    expected[to[:count]] = src[at[:count]]
    assert run(launch, dst, to[:count], src, at[:count], grid=grid) == 0
    assert np.array_equal(dst, expected)


def test_a_page_of_the_smallest_model(launch: Launch) -> None:
    dst, src = aligned(12, 114_048, 1), aligned(9, 114_048, 2)
    to, at = [11, 0, 7, 3], [8, 8, 0, 4]
    expected = dst.copy()
    expected[to] = src[at]
    assert run(launch, dst, to, src, at, grid=16) == 0
    assert np.array_equal(dst, expected)


def test_what_it_cannot_copy_is_refused(launch: Launch) -> None:
    dst, src, before = aligned(2, 64, 1), aligned(2, 64, 2), aligned(2, 64, 1)
    for size in (0, -16, 8, 24):
        assert launch(dst.ctypes.data, None, src.ctypes.data, None, 1, size, 1, None) == INVALID
    assert launch(dst.ctypes.data + 8, None, src.ctypes.data, None, 1, 32, 1, None) == INVALID
    assert launch(dst.ctypes.data, None, src.ctypes.data + 4, None, 1, 32, 1, None) == INVALID
    assert launch(dst.ctypes.data, None, src.ctypes.data, None, -1, 32, 1, None) == INVALID
    assert launch(dst.ctypes.data, None, src.ctypes.data, None, 1, 32, 0, None) == INVALID
    assert np.array_equal(dst, before)


@pytest.mark.skipif("/" not in NVCC, reason=NVCC)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_it_compiles_without_a_warning(architecture: str, tmp_path: Path) -> None:
    flags = ["-std=c++17", f"-arch={architecture}", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    out = tmp_path / "page_copy.ptx"
    for kind, file in (("-c", tmp_path / "page_copy.o"), ("-ptx", out)):
        command = [NVCC, *flags, kind, "-o", str(file), "csrc/page_copy.cu"]
        result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    # Four streaming loads of 16 bytes before the first store: that many are under way at a time.
    accesses = [line.split()[0] for line in out.read_text().splitlines() if "global.cs.v4.u32" in line]
    assert accesses[:5] == ["ld.global.cs.v4.u32"] * 4 + ["st.global.cs.v4.u32"]
    assert f".target {architecture}" in out.read_text()


@needs_compiler
@pytest.mark.soak
def test_its_binding_compiles_without_a_warning() -> None:
    """Takes a minute, for torch's headers."""
    include = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-DTORCH_EXTENSION_NAME=page_copy"]
    command = [COMPILER, *flags, *include, "csrc/page_copy_torch.cpp"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
