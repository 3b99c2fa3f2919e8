"""What can go wrong between text and token ids. The server maps each class to a status; nothing here knows HTTP."""

from __future__ import annotations


class TokenizerError(Exception):
    """Root of this package's errors."""


class TokenizerLoadError(TokenizerError):
    """A model folder has no tokenizer that works here; the message names the file and what it lacks."""


class ChatTemplateError(TokenizerError):
    """These messages cannot be rendered: the template refuses them, or there is none. The client's to correct."""


class EncodeError(TokenizerError):
    """This text has no token ids (it is not valid Unicode). The client's to correct."""
