"""What can go wrong before or around a replay; failures of single requests are records, not exceptions."""

from __future__ import annotations

from pathlib import Path


class ReplayError(Exception):
    """Root: the message is for the user as it is, and the bench ends with it."""


class TraceError(ReplayError):
    """A trace file is not as it should be. `field` is a path such as `requests[3].in`, empty for the whole trace."""

    def __init__(self, file: Path, line: int, field: str, reason: str) -> None:
        super().__init__(f"{file}:{line}: {field}: {reason}" if field else f"{file}:{line}: {reason}")
        self.file = file
        self.line = line
        self.field = field


class VocabularyError(ReplayError):
    """The tokenizer has too few words whose text always gives back the same tokens."""


class OptionError(ReplayError):
    """A flag's value is wrong; the message names the flag and the value."""


class TargetError(ReplayError):
    """The server to measure cannot be reached, or serves no model."""
