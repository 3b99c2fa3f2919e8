"""How long it takes from a request's text to its ids, and from an answer's ids to text, against the usual ways.

encode: an agent's conversation of so many tokens: with words never seen, with known words but new messages (cold), and
        one turn of about 2,000 tokens later. The encode step, and the whole path from the body's bytes to the message
        in the rank's ring; ratios are against transformers' `tokenizer.encode` of the same text. Every result is
        compared with it; one wrong id ends the bench.
lag:    how late the event loop runs while eight such prompts arrive at once beside 64 running streams.
detok:  microseconds a token for 256 streams, against two decodes of a window.

Figures are medians over the rounds. Ceiling of the path: parsing the body alone takes about a third of it.

    python -m bench.encode [--parts NAME ...] [--sizes N ...] [--rounds N]
"""

from __future__ import annotations

if not __package__:
    __import__("report")

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

# Set before `tokenizers` is loaded, as the server does: it would advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bench.encoding import detok, lag, steps
from bench.encoding.conversation import write_model
from bench.report import report

PARTS: Final = ("encode", "lag", "detok")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description="Text to ids and back.")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 16_000, 150_000], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="conversations of each size, and bursts")
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.sizes) < 1:
        parser.error("--rounds and --sizes are above 0")
    with tempfile.TemporaryDirectory() as folder:
        report("encode", list(_rows(write_model(Path(folder) / "deepseek"), args)))
    return 0


def _rows(model: Path, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    if "encode" in args.parts:
        yield from steps.rows(model, args.sizes, args.rounds)
    if "lag" in args.parts:
        yield from lag.rows(model, max(args.sizes), args.rounds)
    if "detok" in args.parts:
        yield from detok.rows(model)


if __name__ == "__main__":
    sys.exit(main())
