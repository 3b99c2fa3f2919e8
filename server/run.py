"""From a Config to an exit status: socket, ranks, tokenizer, HTTP, signals, drain.

The socket listens first, so a taken port fails before a rank is started; ranks load while the tokenizer does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from server.admission import Admission, Limits
from server.app import build
from server.cache import Cache
from server.config import Config, ConfigError
from server.connection import serve
from server.errors import ShuttingDownError
from server.events import EventWriters
from server.keys import KeyFileError, Keys
from server.memory import keep_memory
from server.metrics import Metrics
from server.pool import SharedPool
from server.process import become_subreaper
from server.rank import Rank
from server.route import Router
from server.scrub import Scrubber
from server.services import Services
from server.starting import starting
from server.submit import Submitter
from server.supervise import Supervisor
from server.text import text_tools
from server.timeslice import shorten
from server.tokenizer.encode import Encoder
from server.turns import Turns

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
POLL_S: Final = 0.05
LAG_INTERVAL_S: Final = 0.25
# Time for handlers to write their last event after their streams were ended.
FAREWELL_S: Final = 1.0
# New objects until the youngest are collected, and how many such rounds until the older ones are. Hundreds of streams
# keep thousands of objects alive for seconds: the usual 700 and 10 walk them again and again and free next to nothing.
COLLECT: Final = (20_000, 20, 100)


def run(config: Config) -> int:
    """Serve until a signal or a fatal failure; returns the exit status."""
    keys, tls = _keys(config), _tls(config)  # what is wrong with their files is told before a model is fetched
    config = _with_model(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, keys, tls))


async def _serve(config: Config, keys: Keys, tls: ssl.SSLContext | None) -> int:
    keep_memory()
    shorten()
    _raise_descriptor_limit()
    listener = _listen(config)
    become_subreaper()
    server = _Server(config, keys, tls)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop, signal.Signals(number).name)
    try:
        return await server.run(listener)
    finally:
        listener.close()


class _Server:
    """The life of one server process."""

    def __init__(self, config: Config, keys: Keys, tls: ssl.SSLContext | None) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._status = 0
        self._keys = keys
        self._tls = tls
        self._ranks = [Rank(index, config.max_num_seqs, config.max_num_batched_tokens) for index in range(config.dp)]
        self._pool = SharedPool(config) if config.hicache_size_gb != 0 else None
        self._cache = Cache(self._ranks, self._pool, verify_loads=config.hicache_verify_loads)
        self._turns = Turns()
        self._submitter = self._place()
        self._metrics = Metrics()
        self._metrics.watch(self._ranks, self._submitter.waiting)
        self._metrics.watch_cache(self._ranks, self._cache, self._submitter.twins)

    def _place(self) -> Submitter:
        limits = Limits(self._config.max_waiting, self._config.max_waiting_tokens, shared=self._keys.required)
        admission = Admission(self._ranks, limits)
        router = Router(self._ranks, admission.waiting, affinity=self._config.routing == "affinity")
        for rank in self._ranks:
            rank.on_room = admission.advance
        return Submitter(self._ranks, router, admission, self._cache, self._turns)

    def stop(self, why: str) -> None:
        """First call: finish what runs. Second call: end now."""
        if self._stop.is_set():
            log.info("%s: ending now", why)
        else:
            log.info(
                "%s: shutting down; what is open may take %g s (--shutdown-timeout), a second signal ends it now",
                why,
                self._config.shutdown_timeout,
            )
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def fail(self, why: str) -> None:
        """Something cannot be mended: end with a status that says so."""
        log.critical("%s; the server ends", why)
        self._status = 1
        self._stop.set()
        self._stop_now.set()

    async def run(self, listener: socket.socket) -> int:
        supervisor = Supervisor(
            self._config,
            self._ranks,
            self._metrics,
            self._cache,
            on_fatal=self.fail,
            on_lost=self._submitter.rank_lost,
        )
        if self._pool is not None:
            self._pool.on_fatal = self.fail
        supervisor.start()
        try:
            runner, encoder = await self._open(listener)
            watching = [self._announce(listener), self._watch_lag(), *self._scrubbing()]
            watchers = [asyncio.create_task(work) for work in watching]
            await self._stop.wait()
            # Whatever is still text would find no rank: it is told so now, and nobody waits for the threads.
            encoder.close()
            await self._drain()
            for watcher in watchers:
                watcher.cancel()
            await runner.cleanup()
        finally:
            await supervisor.stop()
            if self._pool is not None:
                self._pool.close()
        log.info("stopped")
        return self._status

    async def _open(self, listener: socket.socket) -> tuple[web.AppRunner, Encoder]:
        async with starting(listener, self._tls, BACKLOG):
            text = await asyncio.to_thread(text_tools, self._config, self._metrics)
            writers = await asyncio.to_thread(EventWriters, text.tokenizer)
        services = Services(
            self._config, text.tokenizer, text.encoder, text.renderer, writers, self._keys, self._ranks,
            self._submitter, self._metrics, self._cache, self._turns,
        )  # fmt: skip
        runner = web.AppRunner(
            build(self._config, services),
            handler_cancellation=True,  # a client that leaves ends its handler, so its request is aborted
            access_log=None,
            shutdown_timeout=FAREWELL_S,
        )
        await runner.setup()
        text.encoder.warm_up()  # in the loop's thread: it encodes short texts itself
        # What is loaded by now stays: collections need not walk it again, request after request.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT)
        await serve(runner, listener, self._tls, BACKLOG)
        return runner, text.encoder

    async def _announce(self, listener: socket.socket) -> None:
        for rank in self._ranks:
            await rank.became_ready.wait()
            assert rank.facts is not None
            if self._config.max_model_len > rank.facts.max_model_len:
                log.warning(
                    "--max-model-len %d is more than rank %d serves: %d",
                    self._config.max_model_len, rank.index, rank.facts.max_model_len,
                )  # fmt: skip
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        print(f"ready: {address} serves {self._config.served_model_name} on {self._config.dp} rank(s). Try:")
        print(_curl_line(address, self._config), flush=True)

    def _scrubbing(self) -> list[Coroutine[None, None, None]]:
        return [] if self._pool is None else [Scrubber(self._cache, self._pool).run()]

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._metrics.loop_lag.observe(max(0.0, time.monotonic() - due))

    async def _drain(self) -> None:
        """Let running requests end, then end the rest with an error."""
        self._submitter.close()
        deadline = time.monotonic() + self._config.shutdown_timeout
        while any(rank.slots.taken for rank in self._ranks):
            if self._stop_now.is_set() or time.monotonic() >= deadline:
                break
            await asyncio.sleep(POLL_S)
        for rank in self._ranks:
            for stream in rank.slots.streams():
                stream.cancel()
                stream.fail(ShuttingDownError("the server is shutting down"))


def _raise_descriptor_limit() -> None:
    """As many descriptors as this user may have: each connection is one, and the usual soft limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(config: Config) -> socket.socket:
    """A bound socket. Raises ConfigError naming the flags."""
    with ExitStack() as opened:
        try:
            family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Not only bound: until somebody listens, a second server could bind the same port, and never serve.
            listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:  # UnicodeError: no such name could exist
            raise ConfigError(f"--host {config.host} --port {config.port}: cannot listen there: {error}") from None
        opened.pop_all()
    return listener


def _keys(config: Config) -> Keys:
    try:
        return Keys(config.api_key, Path(config.api_key_file) if config.api_key_file else None)
    except KeyFileError as error:
        raise ConfigError(str(error)) from None


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.ssl_certfile:
        return None
    for flag, file in (("--ssl-certfile", config.ssl_certfile), ("--ssl-keyfile", config.ssl_keyfile)):
        if file and not Path(file).is_file():
            raise ConfigError(f"{flag} {file}: there is no such file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        key = f" --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else " without --ssl-keyfile"
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}{key}: cannot be used: {error}") from None
    return context


def _with_model(config: Config) -> Config:
    """The config with a model folder: the demo model when none was named. Raises ConfigError."""
    if config.model:
        return config.named(config.model)
    # In a process of its own: what it loads to convert a checkpoint should not stay in this one.
    made = subprocess.run(
        [sys.executable, "-m", "engine.demo"], stdout=subprocess.PIPE, text=True, check=False,
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    if made.returncode != 0:
        raise ConfigError("--model was not given and the demo model could not be made; the lines above say why")
    return config.named(made.stdout.strip().splitlines()[-1])


def _curl_line(address: str, config: Config) -> str:
    # A key is not printed: logs are read by others.
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_key or config.api_key_file else ""
    trust = f" --cacert {config.ssl_certfile}" if config.ssl_certfile else ""
    body = (
        f'{{"model": "{config.served_model_name}", "stream": true, "temperature": 0, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"  curl -N{trust} {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
