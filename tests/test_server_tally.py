"""The array histogram says what prometheus_client's own would."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.tally import Tally

BOUNDS = (0.001, 0.5, 2.0)
values = st.lists(st.sampled_from([0.0, 0.001, 0.0011, 0.5, 1.75, 2.0, 64.0]) | st.floats(0, 100), max_size=20)


@given(st.lists(values, max_size=4))
def test_it_counts_like_the_library(batches: list[list[float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("h", "text", BOUNDS)
    ours.register(tally)
    histogram = Histogram("h", "text", buckets=BOUNDS, registry=theirs)
    for batch in batches:
        tally.add(np.array(batch, np.float64))
        for value in batch:
            histogram.observe(value)
    for bound in (*map(str, BOUNDS), "+Inf"):
        labels = {"le": bound}
        assert ours.get_sample_value("h_bucket", labels) == theirs.get_sample_value("h_bucket", labels)
    assert ours.get_sample_value("h_count") == theirs.get_sample_value("h_count")
    total = theirs.get_sample_value("h_sum")
    assert total is not None
    assert np.isclose(ours.get_sample_value("h_sum") or 0.0, total)
    assert b"# TYPE h histogram" in generate_latest(ours)
