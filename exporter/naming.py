"""How metrics and their labels are called."""

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX: Final = "modelctl_"


def replica(worker: Mapping[str, Any]) -> str:
    """Return the number of a worker among those of its model: ``letters:2`` is the second."""
    return str(worker["name"]).partition(":")[2] or "1"


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge without samples."""
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """Return a counter without samples."""
    return CounterMetricFamily(PREFIX + name, text, labels=labels)
