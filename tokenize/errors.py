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


class EncoderClosedError(TokenizerError):
    """The encoder was closed before this text was done."""

    def __init__(self) -> None:
        super().__init__("the encoder was closed")


class BackendUnavailableError(TokenizerError):
    """A faster backend cannot encode for this tokenizer; the message says why. `auto` goes on to the next."""


class BackendRefusedError(TokenizerError):
    """The backend that was asked for would not give `tokenizer.encode`'s ids; the message shows where."""


class ReferenceRejectedError(TokenizerError):
    """The model's reference encoder does not take this conversation; the message has its words."""
