"""From the bytes of a request to the message in a rank's ring: the server's own parts, a real link, no engine."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from bench.encoding.conversation import MAX_MODEL_LEN
from ipc.link import EngineLink, ServerLink
from ipc.link_memory import LinkShape
from ipc.messages import Facts, Submit
from server.account import Call
from server.admission import Admission, Limits
from server.body import parse
from server.cache import Cache
from server.config import Config
from server.events import EventWriters
from server.fields import ChatRequest
from server.keys import Keys
from server.metrics import Metrics
from server.rank import Rank, RankState
from server.route import Router
from server.services import Asked, Ids, Services
from server.submit import Submitter
from server.text import text_tools
from server.turns import Turns

SHAPE: Final = LinkShape(submit_bytes=2**24, event_bytes=2**16, token_records=2**14)
FACTS: Final = Facts(
    engine="none", model_type="none", dtype="none", device="none", vocab_size=129280, eos_ids=(1,),
    max_model_len=MAX_MODEL_LEN, max_num_seqs=8, block_size=128, num_blocks=2**16, page_bytes=1024,
)  # fmt: skip


class SubmitPath:
    """Steps 1 to 6 of a request for one backend, inside its `with` block."""

    def __init__(self, model: Path, backend: str) -> None:
        config = Config(model=str(model), tokenizer_backend=backend, tokenizer_verify_rate=0.0).named(str(model))
        metrics = Metrics()
        text = text_tools(config, metrics)
        self._server = ServerLink.create(SHAPE)
        self._engine = EngineLink.attach(self._server.fds, SHAPE)
        rank = Rank(0, FACTS.max_num_seqs, MAX_MODEL_LEN)
        rank.state, rank.facts, rank.link = RankState.READY, FACTS, self._server
        admission = Admission([rank], Limits(requests=8, tokens=2**30, shared=False))
        cache, turns = Cache([rank]), Turns()
        submitter = Submitter([rank], Router([rank], admission.waiting, affinity=True), admission, cache, turns)
        self._services = Services(
            config, text.tokenizer, text.encoder, text.renderer, EventWriters(text.tokenizer), Keys((), None), [rank],
            submitter, metrics, cache, turns,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._services.encoder.warm_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._services.encoder.close()
        self._engine.close()
        self._server.close()

    async def submit(self, body: bytes) -> tuple[float, Ids]:
        """Seconds until the message is in the ring, and the ids the engine reads there."""
        services = self._services
        started = time.perf_counter()
        request = parse(body, ChatRequest)
        prompt = await services.render(request.messages)
        ids = await services.encode(prompt, "messages", add_special_tokens=False)
        asked = Asked(Call("bench", "chat", "anonymous"), "messages", b"session", request.max_tokens, -1)
        (generation,) = services.generations(asked, [ids], request)
        with generation:
            await generation.start()
            seconds = time.perf_counter() - started
        (submitted, _) = self._engine.receive(2)  # the request, and its cancel
        assert isinstance(submitted, Submit)
        self._end(submitted)
        return seconds, np.frombuffer(submitted.ids, "<i4")

    def _end(self, submitted: Submit) -> None:
        """As when the engine says that the request is over: its tokens and its slot are free for the next one."""
        rank = self._services.ranks[0]
        stream = rank.slots.find(submitted.slot, submitted.generation)
        assert stream is not None
        rank.prefilled(stream)
        rank.slots.release(submitted.slot)
