"""Records -> the figures of a run, and their rows in a table. Knows nothing about how they came about.

Quantiles are over requests. The inter-token time of a request is that from its first to its last text, over the tokens
between; interactivity is its inverse, so its p90 is what nine of ten requests exceed. Input tokens include cached ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from bench.agentx.record import CUT, Record, counted

QUANTILES: Final = (50, 90, 99)
HOUR_S: Final = 3600.0

Figures = dict[str, float | None]


def summary(records: Sequence[Record], ranks: int) -> dict[str, Any]:
    """All figures by name; None where no request has one."""
    done = counted(records)
    window = _window(done)
    prompt, cached, output = (
        sum(getattr(record, name) for record in done)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    inter_token = spread(record.inter_token for record in done)
    rate = 1 / window if window else math.nan
    return {
        "requests": len(done),
        "warm-up": sum(record.warmup and not record.error for record in records),
        "cut off": sum(record.error == CUT for record in records),
        "errors": dict(Counter(record.error for record in records if record.error not in ("", CUT))),
        "window_s": window,
        "requests_per_hour": _known(HOUR_S * len(done) * rate),
        "ttft_s": spread(record.ttft for record in done),
        "inter_token_s": inter_token,
        "end_to_end_s": spread(record.end for record in done),
        "interactivity": {name: 1 / value if value else None for name, value in inter_token.items()},
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "tokens_per_second_per_rank": _known((prompt + output) * rate / ranks),
        "output_per_second_per_rank": _known(output * rate / ranks),
        **_cache_figures(done, prompt, cached),
        "drift_in": drift(record.prompt_tokens - record.trace_in for record in done),
        "drift_sent": drift(record.prompt_tokens - record.sent_tokens for record in done),
    }


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """The figures as lines of a table: one of quantiles, one of plain values."""
    lines: list[dict[str, object]] = []
    for name, label, factor in SPREADS:
        values: Figures = found[name]
        lines.append({"figure": label} | {key: value * factor for key, value in values.items() if value is not None})
    for name, label, factor in VALUES:
        if found[name] is not None:
            lines.append({"figure": label, "value": found[name] * factor})
    lines.append({"figure": "errors", "value": sum(found["errors"].values())})
    lines += [{"figure": f"  {kind}", "value": count} for kind, count in found["errors"].items()]
    return lines


# Name in the summary, label with unit, factor to that unit.
SPREADS: Final = (
    ("ttft_s", "time to first token, s", 1.0),
    ("inter_token_s", "inter-token time, ms", 1000.0),
    ("interactivity", "interactivity, tok/s", 1.0),
    ("end_to_end_s", "end to end, s", 1.0),
)
VALUES: Final = (
    ("requests", "requests", 1),
    ("requests_per_hour", "requests per hour", 1.0),
    ("tokens_per_second_per_rank", "input+output tok/s per rank", 1.0),
    ("output_per_second_per_rank", "output tok/s per rank", 1.0),
    ("cached_share", "cached share, %", 100.0),
    ("ceiling_pages", "ceiling by pages sent, %", 100.0),
    ("ceiling_blocks", "ceiling by the traces, %", 100.0),
    ("cached_of_ceiling", "cached of ceiling by pages, %", 100.0),
)
DRIFTS: Final = (
    ("drift_in", "`in` of the traces (marker and template are not in it)"),
    ("drift_sent", "the local count"),
)


def spread(values: Iterable[float | None]) -> Figures:
    """Quantiles and mean of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return {**{f"p{at}": None for at in QUANTILES}, "mean": None}
    found = np.percentile(known, QUANTILES)
    return {
        **{f"p{at}": float(value) for at, value in zip(QUANTILES, found, strict=True)},
        "mean": float(np.mean(known)),
    }


def drift(differences: Iterable[int]) -> Figures:
    """Least, mean and greatest difference in tokens."""
    known = list(differences)
    if not known:
        return {"min": None, "mean": None, "max": None}
    return {"min": min(known), "mean": sum(known) / len(known), "max": max(known)}


def drift_lines(found: dict[str, Any]) -> list[str]:
    """How far the server's count of prompt tokens is from the traces', and from the prompts as they were built."""
    lines = [
        f"prompt tokens by the server minus {what}: {values['min']} to {values['max']}, mean {values['mean']:.4g}"
        for name, what in DRIFTS
        if (values := found[name])["mean"] is not None
    ]
    if any(found["drift_sent"][end] for end in ("min", "max")):
        lines.append(
            "so the server's tokenizer or template is not that of --tokenizer: the ceiling by pages is a guess"
        )
    return lines


def _window(done: Sequence[Record]) -> float:
    """Seconds from the first request's start to the last one's end."""
    if not done:
        return 0.0
    return max(record.start + (record.end or 0.0) for record in done) - min(record.start for record in done)


def _cache_figures(done: Sequence[Record], prompt: int, cached: int) -> Figures:
    pages = sum(record.shared_pages for record in done)
    sent = sum(record.sent_tokens for record in done)
    trace_in = sum(record.trace_in for record in done)
    return {
        "cached_share": _share(cached, prompt),
        "ceiling_pages": _share(pages, sent),
        "ceiling_blocks": _share(sum(record.shared_blocks for record in done), trace_in),
        "cached_of_ceiling": _share(cached, pages),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
