"""Messages between the server process and one engine rank, grouped by receiver.

Fields only: the wire form is `ipc/codec.py`, the way across is `ipc/link.py`. Tokens do not travel here
but as fixed records in the token ring (`ipc/layout.py`). Knows nothing about HTTP, text or torch.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import msgspec


class Finish(IntEnum):
    """Why a request ended: `finish` of a token record. NONE means it goes on."""

    NONE = 0
    STOP = 1  # an end-of-sequence id was sampled; the record carries it
    LENGTH = 2  # max_tokens or the context is used up
    CANCELLED = 3  # the server asked; the record carries no token
    ERROR = 4  # a `RequestError` event with the reason was published before the record


class Flag(IntFlag):
    """`flags` of a token record."""

    TOKEN = 1  # the record carries a token (an end of stream may come without one)
    EOS = 2  # the token is one of the model's end-of-sequence ids, not text
    TOP = 4  # a `TopLogprobs` event for this position was published before the record


# ---- server -> engine (submit ring) ----


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. A draw depends only on (seed, position), never on the batch around it."""

    seed: int  # 64-bit unsigned; the server draws one when the client gave none
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # -1: none; k >= 0: the token's own and the k best


class CachePlan(msgspec.Struct, frozen=True):
    """What to do with a prompt's pages: a part of its Submit, made by `hicache/plan.py`.

    Host slots are rows of the pool that all ranks share. Every plan is answered by one CacheLoaded, and by one
    CacheStored if it has anything to store, whatever becomes of its request.
    """

    plan: int  # its name in the answers
    root: bytes  # 16 bytes: where the chain of keys begins (caller, model, layout)
    keys: bytes  # 16 bytes a page, for each whole page of the prompt
    reuse: bool = True  # False: compute the whole prompt, also where the device still has its pages
    load: bytes = b""  # uint32 host slots of the prompt's first pages
    load_sums: bytes = b""  # uint64 checksums of these pages, to be checked; empty: not checked
    load_state: int = -1  # host slot of the state behind these pages; -1: the model has none
    load_state_sum: int = 0  # its checksum; looked at only where there are load_sums
    store_from: int = 0  # the page that goes into the first slot of `store`
    store: bytes = b""  # uint32 host slots for pages from there on, once the prompt is computed
    store_states: tuple[tuple[int, int], ...] = ()  # (pages before the state, host state slot)


class Submit(msgspec.Struct, frozen=True, tag=1):
    """A new request. `slot` and `generation` name it in every later message and token record."""

    slot: int
    generation: int
    request_id: str  # for log lines only
    ids: bytes  # the prompt, little-endian int32
    max_tokens: int
    sampling: Sampling
    min_tokens: int = 0  # no end-of-sequence id before that many tokens
    ignore_eos: bool = False
    cache: CachePlan | None = None  # None: nothing is reused and nothing kept


class Cancel(msgspec.Struct, frozen=True, tag=2):
    """The client is gone. Answered by one CANCELLED record, or by nothing if the request had already ended."""

    slot: int
    generation: int


class Shutdown(msgspec.Struct, frozen=True, tag=3):
    """Leave the loop after this pass; running requests are dropped."""


class CacheAttach(msgspec.Struct, frozen=True, tag=4):
    """The host pool has its size now: map it, and be ready. Answers Loaded."""

    pages: int
    page_bytes: int
    states: int
    state_bytes: int


class CacheStore(msgspec.Struct, frozen=True, tag=5):
    """Store pages and states that were offered, as far as the device still has them. Answered by one CacheStored."""

    plan: int
    keys: bytes  # 16 bytes a page
    store: bytes  # uint32 host slots
    states: tuple[tuple[int, int], ...] = ()  # (name in the offer, host state slot)


class CacheForget(msgspec.Struct, frozen=True, tag=6):
    """Reuse nothing of what the device holds now; running requests keep theirs."""


Command = Submit | Cancel | Shutdown | CacheAttach | CacheStore | CacheForget


# ---- engine -> server (event ring) ----


class Facts(msgspec.Struct, frozen=True):
    """What a rank says of its engine and model once it is ready."""

    engine: str  # native, fake, deepinfer
    model_type: str
    dtype: str
    device: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int  # prompt + output tokens of one request
    max_num_seqs: int
    block_size: int  # tokens
    num_blocks: int
    page_bytes: int  # one block, all layers
    state_bytes: int = 0  # per state slot; 0: the model keeps everything in pages
    num_states: int = 0
    state_window: int = 0  # a prompt's states are still there for boundaries this near to its end, in tokens
    first_state: int = 0  # the lowest boundary that has a state, in tokens
    keep_tokens: int = 1  # tail of a prompt that must always be computed
    layout_digest: str = ""  # equal digests: pages of one rank mean the same on the other
    lockstep: bool = False  # ranks step together and live and die together


class Loaded(msgspec.Struct, frozen=True, tag=21):
    """The model is loaded; the rank waits for CacheAttach. Only where its launch names a host pool."""

    facts: Facts


class Ready(msgspec.Struct, frozen=True, tag=16):
    """The model is loaded and the loop runs."""

    facts: Facts


class RequestError(msgspec.Struct, frozen=True, tag=17):
    """One request failed in the engine; its ERROR record follows in the token ring."""

    slot: int
    generation: int
    message: str
    client_fault: bool  # True: the request asked for something impossible


class TopLogprobs(msgspec.Struct, frozen=True, tag=18):
    """The most probable ids at one position, best first, natural logarithms."""

    slot: int
    generation: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Stats(msgspec.Struct, frozen=True, tag=19):
    """Gauges of this moment and counters since the rank started; sent at intervals and when the rank falls idle."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    steps: int
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    blocks_cached: int = 0  # of the blocks not in use: those that hold pages to reuse
    stalls: int = 0  # passes skipped because the server did not drain its rings


class CacheLoaded(msgspec.Struct, frozen=True, tag=22):
    """What a request reused: published before its first token, or when it ended without one.

    Its host slots are not read any more.
    """

    plan: int
    device_tokens: int = 0  # of its prompt, from blocks still on the device
    host_tokens: int = 0  # and copied from the host pool
    deferred: bool = False  # it had to wait for device blocks
    bad: int = -1  # index in `load` of a page with a wrong checksum; len(load): the state
    error: str = ""  # why loading failed; the prompt was then computed


class CacheStored(msgspec.Struct, frozen=True, tag=23):
    """The first `pages` slots of a plan, and these states, hold what they were meant for. The others hold nothing."""

    plan: int
    pages: int = 0
    sums: bytes = b""  # uint64 checksums of these pages
    states: tuple[tuple[int, int], ...] = ()  # (host state slot, checksum)
    error: str = ""


class CacheOffer(msgspec.Struct, frozen=True, tag=24):
    """Whole pages that an ended request computed beyond those of its prompt, and states behind some of them.

    For a while the device still has them.
    """

    parent: bytes  # key of the page before them, or the root
    keys: bytes  # 16 bytes a page
    ids: bytes  # their tokens, little-endian int32
    states: tuple[tuple[int, int], ...] = ()  # (pages of these before the state, its name)


class Failed(msgspec.Struct, frozen=True, tag=20):
    """The rank cannot go on (or never came up) and exits right after."""

    message: str


Event = Loaded | Ready | RequestError | TopLogprobs | Stats | CacheLoaded | CacheStored | CacheOffer | Failed


# ---- argv of an engine process ----


class LinkFds(msgspec.Struct, frozen=True):
    """Inherited descriptors of one rank's link: the segment and one eventfd a direction."""

    segment: int
    to_engine: int
    to_server: int


class PoolFds(msgspec.Struct, frozen=True):
    """Inherited descriptors of the host pool; its sizes come with CacheAttach."""

    pages: int
    states: int


class Launch(msgspec.Struct, frozen=True):
    """Everything an engine process is told at birth, as one JSON argument of `python -m engine`."""

    rank: int
    world: int
    engine: str  # native or fake
    model: str  # folder
    link: LinkFds
    parent_pid: int  # the rank ends itself when this is no longer its parent
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0  # 0: the engine's own choice
    max_model_len: int = 0  # 0: the model's own
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 32768
    num_kv_blocks: int = 0  # 0: sized from memory
    gpu_memory_utilization: float = 0.9
    log_interval_steps: int = 200
    pool: PoolFds | None = None  # None: no prefix is reused
