"""Whether a live server answers the same with its prefix cache and without, and what the cache saves.

Holds conversations of several turns; every turn is asked twice, greedy and streamed: as usual, then with
`"prefix_cache": false`. Some turns go back and ask the last question anew from its middle on, so that prefixes branch
inside pages. Exit code 1 as soon as any answer differs; a difference between two tokens that the model finds equally
likely (TIE, in natural logarithms) is listed as a tie, because sums in another order may turn it around.

Ceiling: a hit computes prompt - cached tokens, so its time to first token is at least that share of a miss's.

    python -m bench.check_prefix_cache [--url URL] [--api-key KEY] [--conversations N] [--turns N]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec

from bench.report import report

PATH: Final = "/v1/chat/completions"
EXPLAIN: Final = "/deepinfer/requests"
TIMEOUT_S: Final = 600.0
# Log-probabilities of two candidates this near to each other say that either could have come first.
TIE: Final = 1e-4
# One turn in so many goes back and asks the last question anew.
BRANCH_ODDS: Final = 3
SENTENCE: Final = "the sea lies calm and wide while a boat goes out at night with seven lamps to find what was lost"


class CheckError(Exception):
    """The server does not answer as an answer must be."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer and the likeliest candidates at its place."""

    text: str
    likely: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave."""

    text: str
    tokens: list[Token]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int  # of them, copied from the host pool


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0: all the same, 1: an answer differs, 2: the server did not answer."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.check_prefix_cache",
        description="Ask a live server everything twice, with its prefix cache and without, and compare the answers. "
        "Exit code 0: all the same, 1: an answer differs, 2: the server did not answer.",
    )
    parser.add_argument(
        "--url", type=_base, default="http://127.0.0.1:8888", help="of the server (default: %(default)s)"
    )
    parser.add_argument("--api-key", default="", help="if the server wants one")
    parser.add_argument("--conversations", type=int, default=4, help="that take turns (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation (default: %(default)s)")
    parser.add_argument("--words", type=int, default=300, help="of a question at most (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the questions (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        rows = asyncio.run(_check(args))
    except (aiohttp.ClientError, TimeoutError, CheckError) as error:
        print(f"{args.url}: {error}", file=sys.stderr)
        return 2
    report("check_prefix_cache", [*rows, _summary(rows)])
    return 1 if any(row["same"] == "NO" for row in rows) else 0


def _base(url: str) -> str:
    """The address of a server, with or without the `/v1` that SDKs want."""
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{url!r} does not begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


async def _check(args: argparse.Namespace) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(args.url, headers=headers, timeout=timeout) as session:
        conversations = [Conversation(number, args) for number in range(args.conversations)]
        # In turns with one another, as agents are: what a small device gives up comes back from the host.
        return [await conversation.turn(session) for _ in range(args.turns) for conversation in conversations]


class Conversation:
    """One conversation, a turn at a time."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        self._number = number
        self._args = args
        self._draw = random.Random(f"{args.seed} {number}")
        self._messages: list[dict[str, str]] = []
        self._turns = 0

    async def turn(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Ask, with the cache and without; returns the row."""
        self._messages.append({"role": "user", "content": self._question()})
        cached = await _ask(session, self._messages, self._args, prefix_cache=True)
        computed = await _ask(session, self._messages, self._args, prefix_cache=False)
        self._messages.append({"role": "assistant", "content": cached.text})
        self._turns += 1
        return _row(f"{self._number}.{self._turns}", cached, computed)

    def _question(self) -> str:
        words = _words(self._draw, self._args.words)
        if not self._messages or self._draw.randrange(BRANCH_ODDS):
            return f"Conversation {self._number}, turn {self._turns}. {words}"
        self._messages.pop()
        last = self._messages.pop()["content"]
        return last[: self._draw.randint(1, len(last))] + words


def _words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(SENTENCE.split(), k=draw.randint(1, most)))


async def _ask(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], args: argparse.Namespace, *, prefix_cache: bool
) -> Answer:
    body = {
        "messages": messages, "temperature": 0, "max_tokens": args.max_tokens, "logprobs": True, "top_logprobs": 2,
        "stream": True, "stream_options": {"include_usage": True}, "prefix_cache": prefix_cache,
    }  # fmt: skip
    started = time.perf_counter()
    async with session.post(PATH, json=body) as answer:
        if not answer.ok:
            hint = " (--api-key)" if answer.status == HTTPStatus.UNAUTHORIZED else ""
            raise CheckError(f"{await answer.text()}{hint}")
        text, tokens, ttft_s, usage = await _read(answer, started)
        request_id = answer.headers["X-Request-ID"]
    async with session.get(f"{EXPLAIN}/{request_id}") as explained:
        told = (await explained.json())["prompts"][0]
    return Answer(
        text, tokens, ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
        told["cached_host"],
    )  # fmt: skip


async def _read(answer: aiohttp.ClientResponse, started: float) -> tuple[str, list[Token], float, dict[str, Any]]:
    """Text, tokens, seconds to the first, usage."""
    tokens: list[Token] = []
    usage: dict[str, Any] = {}
    text, ttft_s = "", 0.0
    while (event := await answer.content.readuntil(b"\n\n")) != b"data: [DONE]\n\n":
        if not event.startswith(b"data: "):  # a sign of life during a long prefill
            continue
        chunk = msgspec.json.decode(event.removeprefix(b"data: "))
        if "error" in chunk:
            raise CheckError(chunk["error"]["message"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "")
            for one in (choice["logprobs"] or {}).get("content") or ():
                ttft_s = ttft_s or time.perf_counter() - started
                tokens.append(Token(one["token"], {top["token"]: top["logprob"] for top in one["top_logprobs"]}))
    return text, tokens, ttft_s, usage


def _row(turn: str, cached: Answer, computed: Answer) -> dict[str, Any]:
    return {
        "turn": turn,
        "prompt": cached.prompt_tokens,
        "cached": cached.cached_tokens,
        "from host": cached.host_tokens,
        "ttft ms": cached.ttft_s * 1e3,
        "ttft ms without": computed.ttft_s * 1e3,
        "bypassed": computed.cached_tokens == 0,
        "same": same(cached.tokens, computed.tokens),
    }


def same(ours: Sequence[Token], theirs: Sequence[Token]) -> str:
    """`yes`, `tie` for answers that part where both candidates are equally likely, `NO`."""
    for one, other in zip(ours, theirs, strict=False):
        if one.text != other.text:
            return "tie" if _tie(one, other.text) and _tie(other, one.text) else "NO"
    return "yes" if len(ours) == len(theirs) else "NO"


def _tie(token: Token, candidate: str) -> bool:
    """Whether the candidate could as well have been drawn here."""
    if token.text not in token.likely or candidate not in token.likely:
        return False
    return abs(token.likely[token.text] - token.likely[candidate]) <= TIE


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "turn": "all",
        "prompt": sum(row["prompt"] for row in rows),
        "cached": sum(row["cached"] for row in rows),
        "from host": sum(row["from host"] for row in rows),
        "ttft ms": sum(row["ttft ms"] for row in rows) / len(rows),
        "ttft ms without": sum(row["ttft ms without"] for row in rows) / len(rows),
        "bypassed": all(row["bypassed"] for row in rows),
        "same": f"{sum(row['same'] != 'NO' for row in rows)}/{len(rows)}",
    }


if __name__ == "__main__":
    sys.exit(main())
