"""Which kernels an engine gets, and that they compile cleanly and stay within their memory."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from engine.native.cpu_kernels import BUILD_HINT, VARIABLE, load_kernels
from engine.native.errors import LaunchError
from tests.ipc_twins import ROOT
from tests.test_ipc_build import COMPILER, RUNTIMES, needs_compiler, sanitized_tree

CPU = torch.device("cpu")
NAME = "engine.native._kernels"


def test_the_native_kernels_are_chosen_and_either_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for wanted in (None, "", "native"):
        kernels = load_kernels(CPU, torch.bfloat16, wanted)
        assert kernels is not None
        assert kernels.__name__ == NAME
    assert load_kernels(CPU, torch.float32, "torch") is None
    monkeypatch.setenv(VARIABLE, "torch")
    assert load_kernels(CPU, torch.float32) is None
    with pytest.raises(LaunchError, match=f"{VARIABLE}=rust is neither native nor torch"):
        load_kernels(CPU, torch.float32, "rust")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float16), ("cuda", torch.float32)])
def test_what_they_do_not_serve_is_left_to_torch(device: str, dtype: torch.dtype) -> None:
    assert load_kernels(torch.device(device), dtype, "") is None
    with pytest.raises(LaunchError, match=f"native: the kernels serve no {dtype} on {device}"):
        load_kernels(torch.device(device), dtype, "native")


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)  # what an import finds if it is not built
    assert load_kernels(CPU, torch.float32, "") is None
    assert BUILD_HINT in caplog.text
    with pytest.raises(LaunchError, match=r"setup\.py build_ext --inplace"):
        load_kernels(CPU, torch.float32, "native")


@needs_compiler
@pytest.mark.parametrize("source", ["kernels_module", "isa_portable", "isa_avx2", "isa_avx512"])
def test_it_compiles_without_a_warning(source: str) -> None:
    include = sysconfig.get_paths()["include"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-S", "-o", "-", f"-I{include}"]
    command = [COMPILER, *flags, f"csrc/{source}.cpp"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_the_kernels_pass_their_tests_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    environ = sanitized_tree(sanitizer, tmp_path)
    tests = [f"tests/test_engine_native_cpu_{name}.py" for name in ("attention", "linear")]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout
