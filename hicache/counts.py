"""Counters of the host prefix cache for one rank. They only grow, but for `inflight`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RankCounts:
    """What one rank's requests did with the pool since the server started."""

    lookups: int = 0  # requests that were allowed to reuse and told what they did
    hits: int = 0  # of them, those that reused anything
    lookup_tokens: int = 0  # their prompts
    hit_tokens: int = 0  # reused, from the device or the host
    deferred: int = 0  # waited for device blocks
    stores: int = 0  # plans that stored a page or a state
    store_skipped: int = 0  # plans with pages that the pool lacks, but which store none
    store_no_room: int = 0  # of them, those for want of room; the others' pages were being stored
    pages_stored: int = 0
    pages_loaded: int = 0  # copied from the host
    states_stored: int = 0
    states_loaded: int = 0
    evicted_pages: int = 0  # to make room for this rank's
    evicted_states: int = 0
    errors: int = 0  # failed copies and wrong checksums
    inflight: int = 0  # plans that are not through
