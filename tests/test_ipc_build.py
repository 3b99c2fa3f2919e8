"""The native modules' build: their switches, its warnings, and the ring tests under the sanitizers."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import RingUnavailableError
from ipc.ring import load_rings
from tests.ipc_twins import ROOT

SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
COMPILER = shutil.which("g++") or shutil.which("clang++") or "no C++ compiler"
needs_compiler = pytest.mark.skipif("/" not in COMPILER, reason=COMPILER)


def test_switches_become_flags() -> None:
    flags = SETUP["build_flags"]
    compile_flags, link_flags = flags({})
    assert not link_flags
    assert not [flag for flag in compile_flags if "sanitize" in flag or flag in ("-Werror", "--coverage")]
    assert {"-O0", "-Werror", "-UNDEBUG"} <= set(flags({"DEEPINFER_DEBUG": "1"})[0])
    for sanitizer in ("address", "thread", "undefined"):
        for some in flags({"DEEPINFER_SANITIZE": sanitizer}):
            assert f"-fsanitize={sanitizer}" in some
    for some in flags({"DEEPINFER_COVERAGE": "1"}):
        assert "--coverage" in some
    with pytest.raises(SystemExit, match="DEEPINFER_SANITIZE=memory is none of address, thread, undefined"):
        flags({"DEEPINFER_SANITIZE": "memory"})


def test_extensions_name_files_that_exist() -> None:
    for extension in SETUP["extensions"]({}):
        assert extension.sources
        for file in (*extension.sources, *extension.depends):
            assert (ROOT / file).is_file(), file


@needs_compiler
@pytest.mark.parametrize(
    "source",
    [f"csrc/{name}.cpp" for name in ("ring_module", "events_module", "keys_module", "walks_module", "page_copy")],
)
def test_a_module_compiles_without_a_warning(source: str) -> None:
    include = sysconfig.get_paths()["include"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsyntax-only", f"-I{include}"]
    result = subprocess.run([COMPILER, *flags, source], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- choosing an implementation ----


def test_the_native_rings_are_chosen_and_either_can_be_forced() -> None:
    assert load_rings("", "x86_64").__name__ == "ipc._ring"
    assert load_rings("native", "aarch64").__name__ == "ipc._ring"
    assert load_rings("python", "aarch64").__name__ == "ipc.ring_py"
    with pytest.raises(RingUnavailableError, match="DEEPINFER_RING=rust"):
        load_rings("rust", "x86_64")


def test_without_the_native_rings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "ipc._ring", None)  # what an import finds if it is not built
    assert load_rings("", "x86_64").__name__ == "ipc.ring_py"
    assert "setup.py build_ext --inplace" in caplog.text
    for wanted, machine in (("native", "x86_64"), ("", "aarch64")):
        with pytest.raises(RingUnavailableError, match=f"on {machine}: build it with"):
            load_rings(wanted, machine)


# ---- sanitizers ----

RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so"}


def library(name: str) -> str:
    """Where the compiler has it."""
    command = [COMPILER, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def sanitized_tree(sanitizer: str, folder: Path) -> dict[str, str]:
    """A copy of what the ring tests need, with its own build; returns the environment to run them in."""
    for name in ("ipc", "engine", "hicache", "csrc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (folder / "server").mkdir()  # where one more native module is built
    for name in ("setup.py", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests" / "conftest.py").unlink(missing_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(folder), "DEEPINFER_SANITIZE": sanitizer}
    build = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, env=environ, check=True)
    # libstdc++ must be there when the runtime looks for the function that throws, and Python itself loads none.
    preload = f"{library(RUNTIMES[sanitizer])} {library('libstdc++.so.6')}"
    # Python itself frees little at its end, which is no leak of ours.
    return {**environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_the_ring_tests_pass_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    environ = sanitized_tree(sanitizer, tmp_path)
    tests = [
        f"tests/test_ipc_{name}.py"
        for name in ("ring", "ring_corrupt", "layout", "heartbeat", "doorbell", "backlog", "crash")
    ]
    tests += [f"tests/test_hicache_{name}.py" for name in ("keys", "walks", "index", "plan")]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert " passed" in result.stdout
