"""A Prometheus histogram that takes whole arrays: one call per drained batch instead of one per token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.core import HistogramMetricFamily, Metric


class Tally:
    """Counts per bucket and a sum, kept in numpy; a collector of one histogram."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text = name, text
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: npt.NDArray[np.floating[Any]]) -> None:
        """Count these values, of any number."""
        # side=left: a value equal to a bound belongs below it, as Prometheus' "le" says.
        where = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(where, minlength=len(self._counts))
        self._sum += float(values.sum())

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        family = HistogramMetricFamily(self._name, self._text)
        below = np.cumsum(self._counts).tolist()
        names = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        family.add_metric([], list(zip(names, below, strict=True)), self._sum)
        yield family
