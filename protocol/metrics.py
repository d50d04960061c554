"""Make the metrics of two answers of the supervisor. Pure.

Names are those of vLLM, with the prefix ``modelctl_``, so that its dashboards need little change. The labels ``model``,
``replica`` (the number of a model's worker, from 1), ``gpu`` (as nvidia-smi counts) and ``key`` (empty for requests of
the supervisor's own user) have as many values as models.yaml and the file of keys, at most 65 keys.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

# How metrics and their labels are called.


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


# Make the metrics of workers on other machines. Pure. Without a cluster they have no samples.


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


# Write metrics as text for Prometheus, in pieces, so that a process can do other work between two of them. Pure.


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
EVERY_S: Final = 1.0
"""Seconds for which a text is given again. The metrics of many models take long to make."""
_LINES: Final = 500
"""Most lines of a piece: 2 to 5 ms of work."""
_LEVEL: Final = 1
"""Level of compression. A higher level takes three times as long for a little less."""
_GZIP: Final = 16 + zlib.MAX_WBITS
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def pieces(found: Iterable[Metric]) -> Iterator[bytes]:
    """Yield the text of metrics, in the format CONTENT_TYPE."""
    for metric in found:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        help_text = metric.documentation.translate(_HELP_ESCAPES)
        lines = [f"# HELP {name} {help_text}\n# TYPE {name} {metric.type}\n"]
        for sample in metric.samples:
            lines.append(_line(sample))
            if len(lines) >= _LINES:
                yield "".join(lines).encode()
                lines.clear()
        yield "".join(lines).encode()


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items()))
    shown = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{shown} {float(sample.value)!r}\n"


def compressed(text: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text in the format of gzip."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    for piece in text:
        yield packer.compress(piece)
    yield packer.flush()


def accepts_gzip(header: str) -> bool:
    """Return whether a client takes gzip, by its header Accept-Encoding."""
    for coding in header.lower().replace(" ", "").split(","):
        name, _, weight = coding.partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


STATES: Final = (
    "starting", "loading", "ready", "draining", "stopping", "stopped", "backoff", "unloaded",
    "falling_asleep", "asleep", "waking", "failed",
)  # fmt: skip
TROUBLES: Final = ("log", "config", "gpus", "gateway", "keys", "queue", "cluster", "listen", "folders")
HELP: Final[Mapping[str, str]] = {
    "time_to_first_token_seconds": "Time from the acceptance of a request to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of an answer: the mean of each answer, for each token.",
    "e2e_request_latency_seconds": "Time from the acceptance of a request to its end.",
    "request_queue_time_seconds": "Time from the acceptance of a request until a worker got it.",
    "request_prefill_time_seconds": "Time from the start in the engine to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
    "request_prompt_tokens": "Tokens of the prompt of a finished request.",
    "request_generation_tokens": "Tokens of the answer of a finished request.",
}
_TOKENS: Final = (
    ("prompt_tokens", "prompt", "Tokens of the prompts of finished requests."),
    ("prefix_cache_queries", "prompt", "Tokens of prompts that were looked up in the prefix cache."),
    ("prefix_cache_hits", "cached", "Tokens of prompts that the prefix cache had."),
    ("spec_decode_num_accepted_tokens", "draft_accepted", "Speculated tokens that were right."),
    ("spec_decode_num_rejected_tokens", "draft_rejected", "Speculated tokens that were wrong."),
)
_STATS: Final = (
    ("jobs_per_step", "jobs_per_step", 1, "Requests in one step of the engine, mean."),
    ("tokens_per_step", "tokens_per_step", 1, "Tokens of answers in one step of the engine, mean."),
    ("step_seconds", "step_ms", 0.001, "Time of a step of the engine, median."),
    ("prefill_share", "prefill_share", 1, "Share of the steps in which prompts were read."),
    ("draft_acceptance", "draft_accepted", 1, "Share of the speculated tokens that were right."),
)


def exposition(status: Values, metrics: Values) -> bytes:
    """Return the text of ``families`` at once."""
    return b"".join(pieces(families(status, metrics)))


def families(status: Values, metrics: Values) -> Iterator[Metric]:
    """Yield all metrics. ``protocol.metrics`` writes them.

    status   the supervisor's answer to the verb ``status``
    metrics  its answer to the verb ``metrics``
    """
    yield from _of_models(metrics["models"], metrics["bounds"], _totals(status["models"]))
    yield from _of_workers(status["models"])
    yield from _of_gpus(status["models"], status.get("gpus", ()))
    yield from of_cluster(status["supervisor"], status["models"])
    yield from _of_supervisor(status["supervisor"], metrics)


def _totals(workers: list[Values]) -> dict[str, Values]:
    """Return the entry of one worker for each model. ``queued`` and ``totals`` are the same for all of them."""
    return {worker["model"]: worker for worker in workers}


def _of_models(models: Mapping[str, Values], bounds: Values, totals: Mapping[str, Values]) -> Iterator[Metric]:
    waiting = gauge("num_requests_waiting", "Requests that wait to be computed.", "model")
    oldest = gauge("oldest_waiting_seconds", "Age of the oldest request that waits; 0 if none does.", "model")
    generated = counter("generation_tokens", "Tokens of answers that workers have sent.", "model")
    refused = counter("requests_refused", "Requests that were refused because the queue was full.", "model")
    resumed = counter("requests_resumed", "Answers that went on in another worker after a death.", "model")
    ends = counter("request_success", "Requests that ended without an error.", "model", "finished_reason")
    errors = counter("request_errors", "Requests that ended with an error.", "model", "error")
    tokens = [(counter(name, text, "model"), source) for name, source, text in _TOKENS]
    keys = [
        counter("key_requests", "Requests that have ended, by key.", "key", "model"),
        counter("key_prompt_tokens", "Tokens of prompts of finished requests, by key.", "key", "model"),
        counter("key_generation_tokens", "Tokens of answers of finished requests, by key.", "key", "model"),
    ]
    for model, found in models.items():
        if (worker := totals.get(model)) is not None:
            waiting.add_metric([model], worker["queued"])
            generated.add_metric([model], worker["totals"]["tokens"])
            resumed.add_metric([model], worker["totals"]["resumed"])
            refused.add_metric([model], worker["totals"]["refused"])
        oldest.add_metric([model], found["oldest_waiting_s"])
        for reason, count in found["ends"].items():
            ends.add_metric([model, reason], count)
        for error, count in found["errors"].items():
            errors.add_metric([model, error], count)
        for family, source in tokens:
            family.add_metric([model], found["tokens"][source])
        for key, *counts in found["keys"]:
            for family, count in zip(keys, counts, strict=True):
                family.add_metric([key, model], count)
    yield from (waiting, oldest, refused, generated, resumed, ends, errors, *(family for family, _ in tokens), *keys)
    for name in bounds:
        yield _histogram(name, models, bounds[name])


def _histogram(name: str, models: Mapping[str, Values], bounds: list[float]) -> Metric:
    """Return a histogram of all models that have one: the supervisor leaves out those without a value."""
    family = HistogramMetricFamily(PREFIX + name, HELP.get(name, name), labels=["model"])
    for model, found in models.items():
        if (histogram := found["histograms"].get(name)) is not None:
            family.add_metric([model], _buckets(bounds, histogram["counts"]), histogram["sum"])
    return family


def _buckets(bounds: list[float], counts: list[int]) -> list[tuple[str, float]]:
    """Return the counts as Prometheus wants them: for each bound the number of values up to it."""
    found, total = [], 0
    for bound, count in zip([*map(repr, bounds), "+Inf"], counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def _of_workers(workers: list[Values]) -> Iterator[Metric]:
    running = gauge("num_requests_running", "Requests that a worker computes.", "model", "replica")
    states = gauge("worker_state", "1 for the state that a worker is in, else 0.", "model", "replica", "state")
    restarts = counter("worker_restarts", "Starts of a worker after its death.", "model", "replica")
    last = gauge(
        "worker_last_exit", "1 for the way in which a worker's last process ended.", "model", "replica", "reason"
    )
    cache = gauge("kv_cache_usage_perc", "Share of the cache that is in use, from 0 to 1.", "model", "replica")
    speed = gauge("worker_tokens_per_second", "Tokens of answers in a second, lately.", "model", "replica")
    stats = [(gauge(name, text, "model", "replica"), source, unit) for name, source, unit, text in _STATS]
    load = gauge("worker_load_seconds", "Time that the last load took.", "model", "replica")
    host = gauge(
        "worker_host_bytes",
        "Host memory that a worker's copy of its weights takes, asleep or awake.",
        "model",
        "replica",
    )
    wake = gauge("worker_wake_seconds", "Time that the last wake took.", "model", "replica")
    for worker in workers:
        labels = [worker["model"], replica(worker)]
        running.add_metric(labels, worker["active"])
        for state in STATES:
            states.add_metric([*labels, state], worker["state"] == state)
        restarts.add_metric(labels, worker["restarts"])
        if worker.get("last_exit"):
            last.add_metric([*labels, worker["last_exit"]["reason"]], 1)
        speed.add_metric(labels, worker["tokens_per_s"])
        engine = worker.get("engine_stats") or {}
        for used, total in (("pages_used", "pages_total"), ("slots_used", "slots_total")):
            if engine.get(total):
                cache.add_metric(labels, engine.get(used, 0) / engine[total])
        for family, source, unit in stats:
            if isinstance(engine.get(source), (int, float)):
                family.add_metric(labels, engine[source] * unit)
        if worker.get("load_seconds") is not None:
            load.add_metric(labels, worker["load_seconds"])
        host.add_metric(labels, worker["host_bytes"])
        if worker["wake_s"] is not None:
            wake.add_metric(labels, worker["wake_s"])
    yield from (running, states, restarts, last, cache, speed, *(family for family, _, _ in stats), load, host, wake)


def _of_gpus(workers: list[Values], gpus: list[Values]) -> Iterator[Metric]:
    held = gauge("worker_vram_bytes", "GPU memory that a worker holds.", "model", "replica", "gpu")
    estimated = gauge("worker_vram_estimate_bytes", "GPU memory that a worker is expected to take.", "model", "replica")
    for worker in workers:
        labels = [worker["model"], replica(worker)]
        for gpu, size in (worker.get("vram_by_gpu") or {}).items():
            if size is not None:
                held.add_metric([*labels, str(gpu)], size)
        if worker.get("vram_estimate_bytes"):
            estimated.add_metric(labels, worker["vram_estimate_bytes"])
    yield from (held, estimated)
    for name, key, unit, text in (
        ("gpu_memory_bytes", "total_bytes", 1, "Memory of the GPU."),
        ("gpu_memory_used_bytes", "used_bytes", 1, "Memory of the GPU that is in use, by anybody."),
        ("gpu_memory_limit_bytes", "limit_bytes", 1, "Memory of the GPU that models may take."),
        ("gpu_utilization_ratio", "utilization_percent", 0.01, "Share of the time in which the GPU computed, lately."),
        ("gpu_temperature_celsius", "temperature_celsius", 1, "Temperature of the GPU."),
        ("gpu_power_watts", "power_watts", 1, "Power that the GPU takes."),
        ("gpu_power_limit_watts", "power_limit_watts", 1, "The most power that the GPU may take."),
    ):
        family = gauge(name, text, "gpu")
        for gpu in gpus:
            if gpu.get(key) is not None:
                family.add_metric([str(gpu["index"])], gpu[key] * unit)
        yield family


def _of_supervisor(supervisor: Values, metrics: Values) -> Iterator[Metric]:
    counters = supervisor["counters"]
    info = gauge("info", "1, with the version as a label.", "version")
    info.add_metric([supervisor["version"]], 1)
    yield info
    for name, text, value in (
        ("uptime_seconds", "Time since the supervisor was started.", supervisor["uptime_s"]),
        ("connections", "Clients that are connected.", supervisor["connections"]),
        ("held_bytes", "Bytes of events that wait for clients to read.", supervisor["held_bytes"]),
        ("shutting_down", "1 while the supervisor shuts down.", supervisor["shutting_down"]),
        ("log_trouble", "1 while lines of the supervisor's log are lost.", supervisor["log_trouble"] is not None),
    ):
        level = gauge(name, text)
        level.add_metric([], float(value))
        yield level
    troubles = gauge("trouble", "1 while something is wrong with the supervisor as a whole, else 0.", "kind")
    for kind in TROUBLES:
        troubles.add_metric([kind], kind in supervisor["troubles"])
    yield troubles
    for name, text, value in (
        ("cpu_seconds", "Processor time of the supervisor.", metrics["cpu_s"]),
        ("loop_idle_seconds", "Time in which the supervisor's loop had nothing to do.", metrics["waited_s"]),
        ("connections_accepted", "Connections of clients.", counters["connections_accepted"]),
        ("connections_cut_off", "Clients whose connection was ended.", counters["connections_cut_off"]),
        ("bad_frames", "Frames of clients that could not be read.", counters["bad_frames"]),
        ("worker_frames_dropped", "Frames of workers that came too late.", counters["worker_frames_dropped"]),
    ):
        count = counter(name, text)
        count.add_metric([], float(value))
        yield count
    events = counter("events", "Events such as deaths, evictions and reloads, by kind.", "kind")
    for kind, count in metrics["events"].items():
        events.add_metric([kind], count)
    yield events
