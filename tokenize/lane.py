"""One backend with the prefixes it has encoded: a whole prompt's ids for the price of its new part.

Promises the backend's ids of the whole text, and that control tokens in plain ranges are text. A lane is never changed:
when a backend is found wrong, the lane goes with all it remembered. Thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, Frame, Ids
from server.tokenizer.parts import Parts
from server.tokenizer.prefix import MIN_CHARACTERS, Prefix, PrefixCache, inside
from server.tokenizer.typed import Controls, Prompt

# A template ends a prompt with what opens the answer, and writes that differently once the answer is there; a prefix
# that ends so far before the prompt's end is found again. Encoding this much twice costs nothing.
SLACK_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Begun:
    """A prompt and what is known of it already."""

    prompt: Prompt
    prefix: Prefix | None

    @property
    def known(self) -> int:
        """Characters whose ids are known."""
        return 0 if self.prefix is None else len(self.prefix.text)

    @property
    def left(self) -> int:
        """Characters still to encode."""
        return len(self.prompt.text) - self.known


class Lane:
    """Encodes prompts with one backend."""

    def __init__(
        self,
        backend: Backend,
        frame: Frame,
        added: AddedTokens,
        controls: Controls,
        parts: Parts | None,
    ) -> None:
        """No `parts` where the pieces between added tokens depend on each other: then nothing is cut or reused."""
        self.backend: Final = backend
        self.prefixes: Final = PrefixCache()
        self._frame = frame
        self._added = added
        self._controls = controls
        self._parts = parts

    def begin(self, prompt: Prompt) -> Begun:
        """Look up what is known. Fast enough for an event loop."""
        return Begun(prompt, self.prefixes.find(prompt.text, prompt.plain) if self._parts is not None else None)

    def is_short(self, begun: Begun) -> bool:
        """Whether `finish` takes no longer than about a millisecond."""
        if begun.left > self.backend.inline_characters:
            return False
        return not begun.prompt.plain or not self._controls.typed(begun.prompt, begun.known)

    def finish(self, begun: Begun, add_special_tokens: bool) -> Ids:
        """All ids. Raises what the backend raises for text that is not valid Unicode."""
        prompt, start, end = begun.prompt, begun.known, len(begun.prompt.text)
        parts = [] if begun.prefix is None else [begun.prefix.ids]
        border = self._border(prompt, start)
        if border is not None:
            parts += self._encode(prompt, start, border)
            start = border
        known = sum(map(len, parts))
        parts += self._encode(prompt, start, end)
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if border is not None:
            plain = inside(prompt.plain, border)
            self.prefixes.add(prompt.text[:border], plain, ids[:known], begun.prefix)
        return self._frame.around(ids) if add_special_tokens else ids

    def _encode(self, prompt: Prompt, start: int, end: int) -> list[Ids]:
        """Ids of a part that begins and ends at borders, in pieces to be joined."""
        if prompt.plain and self._controls.typed(prompt, start):
            return [self._controls.encode(prompt, start, end, self.backend.encode)]
        if self._parts is None:
            return [self.backend.encode(prompt.text[start:end])]
        return self._parts.encode(prompt.text, start, end, self.backend.encode)

    def _border(self, prompt: Prompt, start: int) -> int | None:
        """Where to cut what is new: at an added token that counts as one."""
        if self._parts is None or len(prompt.text) < MIN_CHARACTERS:
            return None
        high = len(prompt.text) - SLACK_CHARACTERS
        while (border := self._added.last_border(prompt.text, start, high)) is not None:
            over = self._controls.plain_range_at(prompt, border)
            if over is None:
                return border
            high = min(over, border)
        return None
