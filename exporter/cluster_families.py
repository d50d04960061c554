"""Make the metrics of workers on other machines. Pure. Without a cluster they have no samples."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric

from exporter.naming import gauge, replica

Values = Mapping[str, Any]
_NODE: Final = "node"


def of_cluster(supervisor: Values, workers: list[Values]) -> Iterator[Metric]:
    """Yield the metrics of the machines of a cluster, and of the workers' places.

    supervisor  the supervisor's part of the answer to ``status``
    workers     the list of workers in the same answer
    """
    cluster = supervisor["cluster"]
    where = gauge(
        "worker_node_info", "1, with a worker's machine as a label; an empty one is the supervisor's own.",
        "model", "replica", _NODE,
    )  # fmt: skip
    answered = gauge("cluster_last_answer_seconds", "Time since Ray last told which machines there are.")
    up = gauge("node_up", "1 for a machine that Ray lists, 0 for one that went in the last 24 hours.", _NODE)
    gpus = gauge("node_gpus", "GPUs of a machine that Ray may lease.", _NODE)
    leased = gauge("node_gpus_leased", "GPUs of a machine that are leased.", _NODE)
    silent = gauge("node_silent_seconds", "Time since an agent of a worker on a machine was last heard.", _NODE)
    if cluster is not None:
        for worker in workers:
            where.add_metric([worker["model"], replica(worker), worker["node"] or ""], 1)
        if cluster["answered_s"] is not None:
            answered.add_metric([], cluster["answered_s"])
        for node in _each_once(cluster["nodes"]):
            up.add_metric([node["name"]], 1)
            gpus.add_metric([node["name"]], node["gpus"])
            leased.add_metric([node["name"]], node["gpus"] - node["free"])
            if node["heard_s"] is not None:
                silent.add_metric([node["name"]], node["heard_s"])
        for node in cluster["gone"]:
            up.add_metric([node["name"]], 0)
    found: tuple[GaugeMetricFamily, ...] = (where, answered, up, gpus, leased, silent)
    yield from found


def _each_once(nodes: list[Values]) -> Iterator[Values]:
    """Yield the machines without further ones of the same name: Prometheus refuses a scrape that has a series twice."""
    seen: set[str] = set()
    for node in nodes:
        if node["name"] not in seen:
            seen.add(node["name"])
            yield node
