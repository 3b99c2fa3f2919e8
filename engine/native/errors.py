"""Why the native engine does not come up. All of these end the start, never a single request.

NativeEngineError
├── ModelFilesError     the model folder, or a file in it, is missing or unreadable
├── ModelRefusedError   the architecture cannot be computed right here
└── LaunchError         a launch value that cannot work with this model or machine
"""

from __future__ import annotations

from engine.protocol import StartError


class NativeEngineError(StartError):
    """Base of all start-up errors of this engine."""


class ModelFilesError(NativeEngineError):
    """The model folder lacks something; the message names the folder and the file."""


class ModelRefusedError(NativeEngineError):
    """The model would give wrong tokens here; the message names its `model_type` and the reason."""


class LaunchError(NativeEngineError):
    """A launch field does not fit the model or the machine; the message names field, value and arithmetic."""
