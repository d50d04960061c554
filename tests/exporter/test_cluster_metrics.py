"""The metrics of a cluster's machines, made of a status as the supervisor gives it."""

from typing import Any

from protocol.metrics import PREFIX, exposition
from tests.exporter.scraping import parsed
from tests.serving import Serving, engine


def scraped(status: dict[str, Any], metrics: dict[str, Any]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the samples by metric and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for (name, labels), value in parsed(exposition(status, metrics).decode()).items():
        found.setdefault(name.removeprefix(PREFIX), {})[tuple(sorted(labels))] = value
    return found


def node(name: str, gpus: float, free: float, heard_s: float | None) -> dict[str, Any]:
    return {"name": name, "gpus": gpus, "free": free, "heard_s": heard_s}


def test_machines_and_the_places_of_workers() -> None:
    with Serving({"a": engine(replicas=2)}) as serving, serving.client(admin=True) as client:
        status, metrics = client.status(), client.call("metrics")
    alone = scraped(status, metrics)
    ours = {"worker_node_info", "node_up", "node_gpus", "node_gpus_leased", "node_silent_seconds"}
    assert not ours & alone.keys()
    text = exposition(status, metrics).decode()
    assert all(f"# TYPE {PREFIX}{name} gauge" in text for name in ours)

    status["models"][1]["node"] = "big-box"
    status["supervisor"]["cluster"] = {
        "answered_s": 0.4,
        "nodes": [node("desk", 0.0, 0.0, None), node("big-box", 4.0, 1.0, 0.2), node("big-box", 9.0, 9.0, None)],
        "gone": [{"name": "old-box"}],
    }
    found = scraped(status, metrics)
    assert found["node_up"] == {(("node", "desk"),): 1, (("node", "big-box"),): 1, (("node", "old-box"),): 0}
    assert found["node_gpus"] == {(("node", "desk"),): 0, (("node", "big-box"),): 4}
    assert found["node_gpus_leased"] == {(("node", "desk"),): 0, (("node", "big-box"),): 3}
    assert found["node_silent_seconds"] == {(("node", "big-box"),): 0.2}
    assert found["cluster_last_answer_seconds"] == {(): 0.4}
    assert found["worker_node_info"] == {
        (("model", "a"), ("node", ""), ("replica", "1")): 1, (("model", "a"), ("node", "big-box"), ("replica", "2")): 1,
    }  # fmt: skip
    ours.add("cluster_last_answer_seconds")
    assert {name: values for name, values in found.items() if name not in ours} == alone, "other metrics have changed"
