"""Text -> ids, exactly those of `tokenizer.encode`, off the event loop where it takes long (step 3 of a request).

Promises that no text blocks the loop for more than about a millisecond, and that nothing a wrong backend made leaves
once verification has found it out. Knows nothing about chat or requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from server.tokenizer.added import AddedTokens
from server.tokenizer.backend import Backend, CacheCounts, HfBackend, Ids, frame_of
from server.tokenizer.conditions import why_dependent
from server.tokenizer.errors import EncodeError
from server.tokenizer.lane import Begun, Lane
from server.tokenizer.load import TextTokenizer
from server.tokenizer.parts import Parts
from server.tokenizer.typed import Controls, Prompt, prompt_of
from server.tokenizer.verify import Verifier
from server.tokenizer.workers import Workers

# Encoding runs without the interpreter lock, but beyond a few threads it would only take cores from the engines.
MAX_THREADS: Final = 4
# For what a backend sets up in each thread that calls it: fastokens takes up to 30 ms for its first text there.
FIRST_TEXT: Final = "The first text of a thread, with 1 or 2 words more."


class Encoder:
    """Encodes for one tokenizer. `close` it to end its threads.

    `every_control`: the renderer names all added tokens it writes (`typed.py`). `observe(backend, seconds, tokens)` is
    told of every prompt. A share `verify_rate` of them is encoded again by `tokenizers` in the background; one
    difference, and `tokenizers` encodes everything from then on.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        backend: Backend | None = None,
        *,
        every_control: bool = False,
        verify_rate: float = 0.0,
        log_prompts: bool = False,
        observe: Callable[[str, float, int], None] = lambda *_: None,
    ) -> None:
        self._added = AddedTokens(tokenizer.backend)
        self._frame = frame_of(tokenizer.backend)
        independent = why_dependent(tokenizer.backend) is None
        self._observe = observe
        self.controls: Final = Controls(tokenizer.backend, self._added, independent=independent, every=every_control)
        self._plain = HfBackend(tokenizer.backend)
        threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))  # one core is the event loop's
        self._workers = Workers(threads, "encode", self._encode_first)
        self._parts = Parts(self._added, self._workers) if independent else None
        self._lane = self._lane_of(backend or self._plain)
        self.verifier: Final = Verifier(self._plain, self._added, self._distrust, verify_rate, log_prompts=log_prompts)

    @property
    def backend(self) -> Backend:
        """The backend in use."""
        return self._lane.backend

    def prefix_counts(self) -> CacheCounts:
        """Of the cache of whole prefixes."""
        return self._lane.prefixes.counts()

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """Ids of `text`, int32, shape [tokens]. Raises EncodeError for text that is not valid Unicode."""
        return self.encode_prompt(Prompt(text), add_special_tokens)

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> Ids:
        """Ids of texts joined; special tokens count only in those marked True. Raises EncodeError.

        The text is not cut where segments meet, but at the special tokens that count: a conversation in which nobody
        typed one has the ids of its whole text.
        """
        return self.encode_prompt(prompt_of(segments), add_special_tokens=False)

    def encode_prompt(self, prompt: Prompt, add_special_tokens: bool) -> Ids:
        """Ids of a prompt. Raises EncodeError."""
        started = time.perf_counter()
        lane = self._lane
        return self._finish(lane, lane.begin(prompt), add_special_tokens, started)

    async def encode_async(self, prompt: str | Prompt, add_special_tokens: bool) -> Ids:
        """The same without blocking the event loop, whatever the length. Also raises EncoderClosedError."""
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        started = time.perf_counter()
        lane = self._lane
        begun = lane.begin(prompt)
        if lane.is_short(begun):
            return self._finish(lane, begun, add_special_tokens, started)
        work = partial(self._finish, lane, begun, add_special_tokens, started)
        return await asyncio.wrap_future(self._workers.submit(work))

    def warm_up(self) -> None:
        """Start all threads, and encode once in each and in the caller's, so that no prompt pays for it.

        Raises whatever the backend raises for a text that every backend must encode.
        """
        self._encode_first()
        self._workers.start()

    def close(self) -> None:
        """Fail the texts that are encoded or wait for a thread. A thread ends after the text it is at."""
        self._workers.close()
        self.verifier.close()

    def _finish(self, lane: Lane, begun: Begun, add_special_tokens: bool, started: float) -> Ids:
        text = begun.prompt.text
        try:
            ids = lane.finish(begun, add_special_tokens)
            if lane is not self._lane:  # found wrong in the meantime: what it made is not to be trusted
                lane = self._lane
                ids = lane.finish(lane.begin(begun.prompt), add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise EncodeError(_why(text)) from error
        if not begun.prompt.plain:
            self.verifier.offer(lane.backend, text, ids, self._frame if add_special_tokens else None)
        self._observe(lane.backend.name, time.perf_counter() - started, len(ids))
        return ids

    def _encode_first(self) -> None:
        self._lane.backend.encode(FIRST_TEXT)

    def _lane_of(self, backend: Backend) -> Lane:
        return Lane(backend, self._frame, self._added, self.controls, self._parts)

    def _distrust(self, backend: Backend) -> None:
        if self._lane.backend is backend:
            self._lane = self._lane_of(self._plain)


def _why(text: str) -> str:
    place = next(at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return f"the text is not valid Unicode: surrogate U+{ord(text[place]):04X} at character {place}"
