"""Text -> ids, exactly those of `tokenizer.encode`, off the event loop where it takes long (step 3 of a request).

Promises that no text blocks the loop for more than about a millisecond. Knows nothing about chat or requests.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from server.tokenizer.errors import EncodeError
from server.tokenizer.load import TextTokenizer

Ids = npt.NDArray[np.int32]

# Up to here a text is encoded on the loop: 1 ms on a slow core, while handing it to a thread costs 0.1 ms and a turn of
# the loop. Prompts of agents are hundreds of times longer.
INLINE_CHARACTERS: Final = 1024
# Encoding runs without the interpreter lock, but beyond a few threads it would only take cores from the engines.
MAX_THREADS: Final = 4


class Encoder:
    """Encodes for one tokenizer. `close` it to end its threads."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._backend = tokenizer.backend
        threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """Ids of `text`, int32, shape [tokens]. Raises EncodeError for text that is not valid Unicode."""
        try:
            # The batch call is the one that drops the interpreter lock, and it skips offsets nobody asked for.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise EncodeError(_why(text)) from error
        return np.array(encoding.ids, dtype=np.int32)

    async def encode_async(self, text: str, add_special_tokens: bool) -> Ids:
        """The same without blocking the event loop, whatever the length."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.encode, text, add_special_tokens)

    def close(self) -> None:
        """Forget texts that wait for a thread; one being encoded runs to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _why(text: str) -> str:
    place = next(at for at, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return f"the text is not valid Unicode: surrogate U+{ord(text[place]):04X} at character {place}"
