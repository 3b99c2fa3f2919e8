"""API keys: who may call, and under which name the server accounts for them.

Keys come from the command line and from a file that is read again when it changes. Comparison takes the same time
whichever key is tried, and neither keys nor parts of them are ever logged: a caller's name is a digest. A file that
turns bad keeps the keys read before.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from server.errors import UnauthorizedError

log = logging.getLogger(__name__)

# How stale a changed file may be: long enough that a look at it costs nothing per request.
RELOAD_INTERVAL_S: Final = 1.0
ANONYMOUS: Final = "anonymous"  # everybody, on a server without keys
NAME_CHARS: Final = 12


class KeyFileError(ValueError):
    """The key file cannot be read or holds no key; the message names it."""


class Keys:
    """The keys in force. Raises KeyFileError when the file is bad at start."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        self._given = [_digest(key) for key in keys]
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._from_file: list[bytes] = []
        if file is not None:
            self._read(file)

    @property
    def required(self) -> bool:
        """Whether a caller needs a key at all."""
        return bool(self._given) or self._file is not None

    def name_of(self, authorization: str, x_api_key: str) -> str:
        """The caller's name from its `Authorization` or `X-API-Key` header. Raises UnauthorizedError."""
        if not self.required:
            return ANONYMOUS
        self._reload()
        scheme, _, token = authorization.partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else x_api_key
        if not key:
            raise UnauthorizedError("no API key: send it as 'Authorization: Bearer KEY'")
        digest = _digest(key)
        # Every key is compared, so the time does not tell which one came close.
        matches = [hmac.compare_digest(digest, known) for known in (*self._given, *self._from_file)]
        if not any(matches):
            raise UnauthorizedError("the API key is not valid")
        return digest.hex()[:NAME_CHARS]

    def _reload(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._looked < RELOAD_INTERVAL_S:
            return
        self._looked = now
        try:
            if _stamp(self._file) != self._stamp:
                self._read(self._file)
                log.info("read %d API keys from %s", len(self._from_file), self._file)
        except (OSError, KeyFileError) as error:
            log.error("the API keys read before stay in force: %s", error)

    def _read(self, file: Path) -> None:
        try:
            stamp = _stamp(file)
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from None
        keys = [text for line in lines if (text := line.strip()) and not text.startswith("#")]
        if not keys:
            raise KeyFileError(f"--api-key-file {file}: it holds no key")
        self._from_file, self._stamp = [_digest(key) for key in keys], stamp


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp(file: Path) -> tuple[int, int, int]:
    """Changes whenever the file is written or replaced."""
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
