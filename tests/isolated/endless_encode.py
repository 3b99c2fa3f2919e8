"""`python -m server` whose encoder never comes back from a text that says so: native calls, one after the other.

What a text of many minutes does to the end of the process, without a text of many minutes.
"""

from __future__ import annotations

import sys
from typing import Final

from server.__main__ import leave, main
from server.tokenizer import choose
from server.tokenizer.backend import Backend, Ids
from server.tokenizer.fast import FastBackend
from server.tokenizer.load import TextTokenizer

ENDLESS: Final = "this takes for ever"


class Endless(FastBackend):
    """Encodes one text for ever."""

    def encode(self, text: str) -> Ids:
        if ENDLESS in text:
            print(ENDLESS, file=sys.stderr, flush=True)
        while ENDLESS in text:
            super().encode(text)
        return super().encode(text)


def make(tokenizer: TextTokenizer) -> Backend:
    return Endless(tokenizer.backend)


if __name__ == "__main__":
    choose.MAKERS = {"fastokens": make}  # type: ignore[misc]
    leave(main())
