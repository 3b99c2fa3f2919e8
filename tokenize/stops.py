"""Stop strings across piece borders: what may be shown now, and whether the answer is over.

Promises that the shown pieces joined are `before_stop` of the whole text however it was cut, and that no part of a
stop string is shown while it could still become one. Knows nothing about tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """One answer's text on its way to the client."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._held = ""  # the end of the text so far that could open a stop string
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text that is certain to be shown; once `found` is True nothing follows it."""
        text = self._held + text
        end = _first_stop(text, self._stops)
        if end is not None:
            self.found, self._held = True, ""
            return text[:end]
        shown = len(text) - self._open_length(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The rest, once no text follows: an opened stop string that never closed."""
        rest, self._held = self._held, ""
        return rest

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the stop string that is complete first; all of it if there is none."""
    return text[: _first_stop(text, stops)]


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that ends first begins; of several that end there, the longest."""
    places = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(places)[1] if places else None
