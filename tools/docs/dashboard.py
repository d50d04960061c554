"""Make the Grafana dashboard ``deploy/grafana/modelctl.json``. A test checks each query, and the file's schema."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'instance=~"$instance", model=~"$model"'
WIDTH, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """One panel.

    queries  {legend: query}; S in a query stands for the chosen instances and models, I for the instances alone
    unit     Grafana's name of the unit
    kind     timeseries, stat or state-timeline
    width    of 24
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


def quantiles(metric: str) -> dict[str, str]:
    """Return queries for three quantiles of a histogram, by model."""
    rate = f"sum by (model, le) (rate(modelctl_{metric}_bucket{{S}}[$__rate_interval]))"
    return {f"{{{{model}}}} p{q:g}": f"histogram_quantile({q / 100:g}, {rate})" for q in (50, 95, 99)}


def ready_on(machines: str) -> str:
    """Return a query for the workers that are ready, by machine. ``machines`` selects machines by the label node."""
    where = f"on (instance, model, replica) group_left (node) modelctl_worker_node_info{{S, {machines}}}"
    return f'sum by (node) (modelctl_worker_state{{S, state="ready"}} * {where})'


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Models ready", {"": 'sum(modelctl_worker_state{S, state="ready"})'}, kind="stat", width=4),
        Panel("Models failed", {"": 'sum(modelctl_worker_state{S, state="failed"})'}, kind="stat", width=4),
        Panel("Requests running", {"": "sum(modelctl_num_requests_running{S})"}, kind="stat", width=4),
        Panel("Requests waiting", {"": "sum(modelctl_num_requests_waiting{S})"}, kind="stat", width=4),
        Panel("Tokens per second", {"": "sum(rate(modelctl_generation_tokens_total{S}[$__rate_interval]))"},
              kind="stat", width=4),
        Panel("Errors per minute", {"": "60 * sum(rate(modelctl_request_errors_total{S}[$__rate_interval]))"},
              kind="stat", width=4),
        Panel("State of each model", {"{{model}} {{replica}} {{state}}": "modelctl_worker_state{S} == 1"},
              kind="state-timeline", width=24),
    ),
    "Load": (
        Panel("Requests running and waiting", {
            "{{model}} running": "sum by (model) (modelctl_num_requests_running{S})",
            "{{model}} waiting": "sum by (model) (modelctl_num_requests_waiting{S})",
        }),
        Panel("Tokens of answers per second",
              {"{{model}}": "sum by (model) (rate(modelctl_generation_tokens_total{S}[$__rate_interval]))"}),
        Panel("Tokens of prompts per second", {
            "{{model}}": "sum by (model) (rate(modelctl_prompt_tokens_total{S}[$__rate_interval]))",
            "{{model}} from the cache": "sum by (model) (rate(modelctl_prefix_cache_hits_total{S}[$__rate_interval]))",
        }),
        Panel("Ends of requests per second", {
            "{{finished_reason}}":
                "sum by (finished_reason) (rate(modelctl_request_success_total{S}[$__rate_interval]))",
            "error: {{error}}": "sum by (error) (rate(modelctl_request_errors_total{S}[$__rate_interval]))",
        }),
        Panel("Tokens per second by key", {
            "{{key}}": "sum by (key) (rate(modelctl_key_generation_tokens_total{S}[$__rate_interval]))",
        }, stacked=True),
        Panel("Age of the oldest request that waits", {"{{model}}": "modelctl_oldest_waiting_seconds{S}"}, "s"),
    ),
    "Times": (
        Panel("Time to the first token", quantiles("time_to_first_token_seconds"), "s"),
        Panel("Time between tokens", quantiles("inter_token_latency_seconds"), "s"),
        Panel("Time of a request", quantiles("e2e_request_latency_seconds"), "s"),
        Panel("Time in the queue", quantiles("request_queue_time_seconds"), "s"),
        Panel("Time of reading the prompt", quantiles("request_prefill_time_seconds"), "s"),
        Panel("Time of a step", {"{{model}} {{replica}}": "modelctl_step_seconds{S}"}, "s"),
    ),
    "Engines and GPUs": (
        Panel("Cache in use", {"{{model}} {{replica}}": "modelctl_kv_cache_usage_perc{S}"}, "percentunit"),
        Panel("Share of prompts from the prefix cache", {
            "{{model}}": "sum by (model) (rate(modelctl_prefix_cache_hits_total{S}[$__rate_interval]))"
            " / sum by (model) (rate(modelctl_prefix_cache_queries_total{S}[$__rate_interval]))",
        }, "percentunit"),
        Panel("Requests per step", {"{{model}} {{replica}}": "modelctl_jobs_per_step{S}"}),
        Panel("Speculated tokens that were right",
              {"{{model}} {{replica}}": "modelctl_draft_acceptance{S}"}, "percentunit"),
        Panel("GPU memory", {
            "GPU {{gpu}} in use": "modelctl_gpu_memory_used_bytes{I}",
            "GPU {{gpu}} limit": "modelctl_gpu_memory_limit_bytes{I}",
        }, "bytes"),
        Panel("GPU memory by model",
              {"{{model}} {{replica}} on GPU {{gpu}}": "modelctl_worker_vram_bytes{S}"}, "bytes", stacked=True),
        Panel("GPU utilization", {"GPU {{gpu}}": "modelctl_gpu_utilization_ratio{I}"}, "percentunit"),
        Panel("GPU temperature", {"GPU {{gpu}}": "modelctl_gpu_temperature_celsius{I}"}, "celsius"),
        Panel("GPU power", {
            "GPU {{gpu}}": "modelctl_gpu_power_watts{I}",
            "GPU {{gpu}} limit": "modelctl_gpu_power_limit_watts{I}",
        }, "watt"),
        Panel("Host memory of models that sleep",
              {"{{model}} {{replica}}": "modelctl_worker_host_bytes{S}"}, "bytes", width=12, stacked=True),
        Panel("Time of the last wake", {"{{model}} {{replica}}": "modelctl_worker_wake_seconds{S}"}, "s", width=12),
    ),
    "Machines of the cluster": (
        Panel("Machines there or gone",
              {"{{node}} there": "modelctl_node_up{I} == 1", "{{node}} gone": "modelctl_node_up{I} == 0"},
              kind="state-timeline"),
        Panel("GPUs leased", {
            "{{node}} leased": "modelctl_node_gpus_leased{I}",
            "{{node}} all": "modelctl_node_gpus{I}",
        }),
        Panel("Workers that are ready", {
            "{{node}}": ready_on('node!=""'),
            "the supervisor's own machine": ready_on('node=""'),
        }, stacked=True),
    ),
    "Faults and the supervisor": (
        Panel("Restarts in an hour", {"{{model}} {{replica}}": "increase(modelctl_worker_restarts_total{S}[1h])"}),
        Panel("Answers resumed after a death",
              {"{{model}}": "increase(modelctl_requests_resumed_total{S}[$__rate_interval])"}),
        Panel("Events", {"{{kind}}": "sum by (kind) (increase(modelctl_events_total{I}[$__rate_interval]))"}),
        Panel("Processor of the supervisor",
              {"{{instance}}": "rate(modelctl_cpu_seconds_total{I}[$__rate_interval])"}, "percentunit"),
        Panel("Bytes that wait for slow clients", {"{{instance}}": "modelctl_held_bytes{I}"}, "bytes"),
        Panel("Connections", {"{{instance}}": "modelctl_connections{I}"}),
    ),
}  # fmt: skip


def written(query: str) -> str:
    """Return a query with the chosen instances and models in it."""
    return query.replace("{S", "{" + SELECTED).replace("{I", '{instance=~"$instance"')


def dashboard() -> str:
    """Return the dashboard as JSON."""
    return json.dumps(
        {
            "title": "modelctl", "uid": "modelctl", "tags": ["modelctl"], "schemaVersion": 39, "editable": True,
            "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser",
            "templating": {"list": list(_variables())}, "panels": list(_panels()),
        },
        indent=2,
    ) + "\n"  # fmt: skip


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    for name, label, query in (
        ("instance", "Machine", "label_values(modelctl_info, instance)"),
        ("model", "Model", 'label_values(modelctl_worker_state{instance=~"$instance"}, model)'),
    ):
        yield {
            "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": ".*",
        }  # fmt: skip


def _panels() -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for row, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        y, x, tallest = y + 1, 0, 0
        for panel in panels:
            height = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": height})
            x, tallest = x + panel.width, max(tallest, height)
        y += tallest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal", "group": "A"} if panel.stacked else {"mode": "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 0, "stacking": stacking}
    return {
        "id": number, "type": panel.kind, "title": panel.title, "gridPos": place, "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": written(query), "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip
