"""A self-made certificate for 127.0.0.1, by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a certificate and its key; skips the test where the command is missing."""
    if OPENSSL is None:
        pytest.skip("needs the openssl command to make a certificate")
    files = folder / "cert.pem", folder / "key.pem"
    command = [
        OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-out", str(files[0]), "-keyout", str(files[1]),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return files
