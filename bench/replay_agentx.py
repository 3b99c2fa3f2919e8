"""Agent sessions replayed against a live server: what a user of a coding agent waits for, and what the cache serves.

Each lane replays one session after the other, every turn resent whole as agents do, with the recorded think times and
answer lengths; sub-agents run beside their session. Prompts are made of text that gives exactly the recorded number of
tokens, so that equal blocks of a trace are equal tokens. Works against any OpenAI-compatible server.

Ceiling of the cached share: what a cache that forgets nothing could serve, in whole pages of 128 tokens, of the prompts
that were sent; and by the traces' own blocks. Requests per hour depend on the lanes and the think times: compare only
runs of the same work (`--compare` says what differs).

    python bench/replay_agentx.py [TRACES | --synthetic turns=20,scale=0.02] [--url URL --tokenizer FOLDER]
    python bench/replay_agentx.py --compare A.json B.json [--plots FOLDER]

Without --url it starts a server of the demo model for itself.
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import asyncio
import datetime
import gc
import hashlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.agentx import compare, plots, results
from bench.agentx.client import Client, Listed
from bench.agentx.errors import OptionError, ReplayError
from bench.agentx.fitting import fitted, scaled
from bench.agentx.prompts import MARKER_DIGITS
from bench.agentx.record import Record, RunFile, save, saved
from bench.agentx.replay import Replay
from bench.agentx.sent import Local
from bench.agentx.session import Session, session_of
from bench.agentx.settings import Settings, parse
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import Trace, read, write
from bench.report import machine, report
from bench.streaming.server_process import ServerError, ServerProcess
from engine.demo import DemoModelError, demo_folder

NAME = "replay_agentx"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 when a request failed or none was done, 2 when nothing could be replayed."""
    try:
        settings, other = parse(argv)
        if other.compare is not None:
            return _compare(other.compare, settings.plots)
        traces = _traces(settings)
        if other.write_traces is not None:
            write(traces, other.write_traces)
            return 0
        return _replay(settings, traces)
    except (ReplayError, ServerError, DemoModelError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2


def _traces(settings: Settings) -> list[Trace]:
    if settings.traces is not None:
        traces = read(settings.traces, settings.sessions)
    else:
        traces = generate(Options.parse(settings.synthetic))
    return traces if settings.scale == 1 else [scaled(trace, settings.scale) for trace in traces]


def _replay(settings: Settings, traces: list[Trace]) -> int:
    local = Local(settings.tokenizer or demo_folder())
    # Traces are millions of numbers in lists; looking through them for garbage would hold the loop in mid-measurement.
    gc.collect()
    gc.freeze()
    try:
        with _target(settings) as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            settings, records, cut = runner.run(_measured(replace(settings, url=url), traces, local))
    finally:
        local.close()
        gc.unfreeze()
    found = results.summary(records, settings.ranks) | {"cut_turns": cut}
    _publish(settings, traces, records, found)
    return 1 if found["errors"] or not found["requests"] else 0


def _publish(settings: Settings, traces: list[Trace], records: list[Record], found: dict[str, Any]) -> None:
    """On the terminal, and into the files that were asked for."""
    print(f"model {settings.model}, context {settings.max_context}, lanes {settings.lanes}, seed {settings.seed}")
    if found["cut_turns"]:
        print(f"{found['cut_turns']} turns were left out: their conversations had become longer than the context")
    print(*results.drift_lines(found), sep="\n")
    digest = hashlib.sha256(b"".join(map(msgspec.json.encode, traces))).hexdigest()
    public = settings.public() | {"digest": digest[:16]}
    report(NAME, results.rows(found), settings=public, summary=found)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if settings.json is not None:
        save(settings.json, RunFile(date=date, machine=machine(), settings=public, summary=found, records=records))
    if settings.plots is not None:
        plots.draw(records, settings.plots, f"{settings.model}, lanes: {settings.lanes}, {date}")


@contextmanager
def _target(settings: Settings) -> Iterator[str]:
    """The URL of the server to measure; one that was started for it ends with the block."""
    if settings.url:
        yield settings.url
        return
    command = [sys.executable, "-m", "server", "--port", "0", *shlex.split(settings.server_flags)]
    with tempfile.TemporaryDirectory() as folder, ServerProcess(command, {}, Path(folder) / "log") as server:
        server.wait_ready()
        yield f"http://{server.host}:{server.port}"


async def _measured(settings: Settings, traces: list[Trace], local: Local) -> tuple[Settings, list[Record], int]:
    """The settings with what the server told, the records, and how many turns did not fit."""
    async with Client(settings.url, settings.api_key, settings.timeout) as client:
        listed = _chosen(await client.models(), settings.model)
        context, ranks = settings.max_context or listed.max_model_len or 0, settings.ranks or await client.ranks()
        settings = replace(settings, model=listed.id, max_context=context, ranks=ranks)
        whole = [session_of(trace) for trace in traces]
        sessions = _fitted(whole, settings, local)
        cut = sum(session.size for session in whole) - sum(session.size for session in sessions)
        if not sessions:
            raise OptionError(f"--max-context {settings.max_context}: no session has a first turn that short")
        return settings, await Replay(settings, sessions, local, client, listed.id).run(), cut


def _chosen(listed: list[Listed], model: str) -> Listed:
    """The one to ask for; a name that is not listed is the server's to judge."""
    return next((one for one in listed if one.id == model), Listed(model) if model else listed[0])


def _fitted(sessions: list[Session], settings: Settings, local: Local) -> list[Session]:
    if not settings.max_context:
        return sessions
    marker = "0" * MARKER_DIGITS
    found = (fitted(session, lambda step: local.fits(step, marker, settings.max_context)) for session in sessions)
    return [session for session in found if session is not None]


def _compare(files: tuple[Path, Path], folder: Path | None) -> int:
    runs = saved(files[0]), saved(files[1])
    for letter, file, run in zip("AB", files, runs, strict=True):
        print(f"{letter}: {file}, {run.date}, {run.settings.get('url')}, {run.settings.get('model')}")
    for line in compare.differences(*runs):
        print(f"not the same work: {line}")
    report(f"{NAME}_compare", compare.comparison(*runs))
    if folder is not None:
        compare.draw(files, runs, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
