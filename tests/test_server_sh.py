"""`server/server.sh`: start waits until ready or fails with the log's end, stop leaves nothing, status tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.byte_tokenizer import write_model
from tests.serving import DEADLINE_S, POOL_GB, ROOT, alive, eventually
from tests.test_end_to_end_ranks import FORKING


class Script:
    """The script with a run directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder / "tiny")
        self.run_dir = folder / "run"
        (folder / "sitecustomize.py").write_text(FORKING)
        self._environ = {
            **os.environ,
            "DEEPINFER_RUN_DIR": str(self.run_dir),
            "DEEPINFER_PYTHON": sys.executable,
            "PYTHONPATH": str(folder),
        }

    def __call__(self, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "server" / "server.sh", *args],
            env={**self._environ, **environ}, capture_output=True, text=True, check=False, timeout=2 * DEADLINE_S,
        )  # fmt: skip

    def start(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self(
            "start", "--engine", "fake", "--model", str(self.model), "--port", "0", "--hicache-size-gb", POOL_GB, *flags
        )

    def family(self) -> list[int]:
        """The server, its rank and the two helpers that the rank forked."""
        pid = int((self.run_dir / "server.pid").read_text())

        def members() -> list[int]:
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]

        eventually(lambda: len(members()) == 4, "the rank has forked its helpers")
        return members()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    made = Script(tmp_path)
    yield made
    made("stop", DEEPINFER_STOP_TIMEOUT="0")


def test_a_life_from_start_to_stop(script: Script) -> None:
    assert script("status").returncode == 3
    started = script.start()
    assert started.returncode == 0, started.stderr
    address = re.match(r"ready: (http://127\.0\.0\.1:\d+) serves tiny on 1 rank\(s\)", started.stdout)
    assert address is not None
    assert f"curl -N {address[1]}/v1/chat/completions" in started.stdout
    family = script.family()
    status = script("status")
    assert status.returncode == 0
    assert status.stdout.startswith(f"running as process {family[0]}, log in {script.run_dir / 'server.log'}\nready: ")
    again = script.start()
    assert (again.returncode, again.stderr) == (1, f"already running as process {family[0]}; stop it first\n")
    stopped = script("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")
    assert not any(map(alive, family))
    assert "shutting down" in (script.run_dir / "server.log").read_text()
    assert script("status").returncode == 3
    assert script("stop").stdout == "not running\n"


def test_a_server_that_does_not_stop_in_time_is_killed_with_all_its_helpers(script: Script) -> None:
    assert script.start().returncode == 0
    family = script.family()
    assert script("stop", DEEPINFER_STOP_TIMEOUT="0").returncode == 0
    eventually(lambda: not any(map(alive, family)), "nothing of it is left")


@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--dp", "0"], "error: --dp 0 is not between 1 and 64"), (["--prot", "1"], "unrecognized arguments: --prot")],
)
def test_a_start_that_fails_shows_the_end_of_the_log(script: Script, flags: list[str], told: str) -> None:
    failed = script.start(*flags)
    assert failed.returncode == 1
    assert failed.stderr.startswith("the server ended during start; the end of ")
    assert told in failed.stderr
    assert failed.stdout == ""
    assert not (script.run_dir / "server.pid").exists()


@pytest.mark.parametrize("slow", [False, True], ids=["python", "not yet python"])
def test_a_start_that_takes_too_long_is_ended(script: Script, tmp_path: Path, *, slow: bool) -> None:
    python = sys.executable
    if slow:
        wrapper = tmp_path / "slow"
        wrapper.write_text(f'#!/bin/sh\nsleep 1\nexec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        python = str(wrapper)
    flags = "--engine", "fake", "--model", str(script.model), "--port", "0"
    failed = script("start", *flags, DEEPINFER_START_TIMEOUT="0", DEEPINFER_PYTHON=python)
    assert failed.returncode == 1
    assert "was not ready within 0 s" in failed.stderr
    assert script("status").returncode == 3
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(script.model) in command] == []


def test_a_stale_pid_file_names_nobody(script: Script) -> None:
    script.run_dir.mkdir()
    for stale in (str(os.getpid()), "999999999", "rubbish", "-1"):
        (script.run_dir / "server.pid").write_text(stale)
        assert script("status").returncode == 3
        assert script("stop").stdout == "not running\n"
        assert not (script.run_dir / "server.pid").exists()


def test_usage(script: Script) -> None:
    for args in ([], ["restart"]):
        shown = script(*args)
        assert shown.returncode == 2
        assert "start [flags] | stop | status" in shown.stderr
