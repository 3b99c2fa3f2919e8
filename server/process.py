"""One engine process: started, watched, and ended with everything it forked.

Each rank leads a session of its own, so its helpers are found by session id even after it died. The server is a
child subreaper: orphans come to it and leave no zombies. Knows nothing about rings or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

# Between two looks at whether killed helpers are gone: the kernel needs a moment to hand them over.
REAP_PAUSE_S: Final = 0.01
# A helper in uninterruptible sleep may take for ever; the server does not wait for it longer than this.
REAP_ATTEMPTS: Final = 200

_PR_SET_CHILD_SUBREAPER: Final = 36
_ROOT: Final = Path(__file__).resolve().parents[1]
# Fields of /proc/PID/stat behind the command name: state, ppid, pgrp, session.
_SESSION_FIELD: Final = 3


def become_subreaper() -> None:
    """Have orphaned grandchildren reparented to this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class EngineProcess:
    """A running `python -m engine`. `on_exit` is called once, on the event loop, with words for how it ended."""

    def __init__(self, launch: bytes, pass_fds: Sequence[int], on_exit: Callable[[str], None]) -> None:
        # Started from the loop's thread: the kernel's parent-death signal follows the starting thread.
        self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "engine", launch],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))},
        )
        self.exited = asyncio.Event()
        self._how = ""
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._gone)

    @property
    def pid(self) -> int:
        """Also the id of its session and process group."""
        return self._popen.pid

    def kill(self) -> None:
        """End it and its helpers at once; `exited` is set when the kernel is done with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # needs no descriptor, unlike a look into /proc
        for pid in _session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _gone(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._how = _how(self._popen.wait())
        self._end_helpers(REAP_ATTEMPTS)

    def _end_helpers(self, attempts: int) -> None:
        """Kill and collect what is left of the session, then report; helpers of helpers come up one level a time."""
        self.kill()
        for pid in _session(self.pid):
            with contextlib.suppress(ChildProcessError):  # its own parent is still there to collect it
                os.waitpid(pid, os.WNOHANG)
        if attempts and _session(self.pid):
            self._loop.call_later(REAP_PAUSE_S, self._end_helpers, attempts - 1)
            return
        self.exited.set()
        self._on_exit(self._how)


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-status}"


def _session(session: int) -> list[int]:
    """All processes of the session, zombies included; none where /proc cannot be read for want of descriptors."""
    found = []
    try:
        folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    except OSError:
        return []
    for folder in folders:
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # it ended between the listing and the reading
            continue
        # The command name is in parentheses and may itself hold spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        if int(fields[_SESSION_FIELD]) == session:
            found.append(int(folder.name))
    return found
