"""A real Prometheus scrapes the gateway, and its sums are what clients have counted. promtool checks names and rules.

``make test-prometheus`` runs this file. ``make test`` does not, because it needs Debian's package prometheus.
"""

import http.client
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from protocol.metrics import PREFIX
from tests.exporter.scraping import Scraped, mixed_requests
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, wait_until

REQUESTS, THREADS, EVERY_S = 1000, 16, 1.0
DEPLOY = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "modelctl.json"

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install"
)


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with mixed_requests(REQUESTS, THREADS, EVERY_S, seed) as scraped:
        yield scraped


class Prometheus:
    """A Prometheus that scrapes a gateway each second, by the shipped configuration. A context manager."""

    def __init__(self, directory: Path, scraped: Scraped) -> None:
        self._port = free_port()
        settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        settings["global"]["scrape_interval"] = "1s"
        settings["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{scraped.port}"]
        shutil.copy(DEPLOY / "rules.yml", directory)
        (directory / "modelctl.token").write_text(scraped.watcher)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self._command = [
            "prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=error",
        ]  # fmt: skip

    def __enter__(self) -> "Prometheus":
        self._process = subprocess.Popen(self._command)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.wait(timeout=60) == 0

    def value(self, query: str) -> float | None:
        """Return the single value of a query; None if there is none."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=WITHIN)) as connection:
            try:
                connection.request("GET", f"/api/v1/query?query={quote(query)}")
                answer = json.loads(connection.getresponse().read())
            except (OSError, ValueError):
                return None  # it is starting
        found = answer.get("data", {}).get("result", [])
        return float(found[0]["value"][1]) if len(found) == 1 else None


def test_a_real_prometheus_has_the_sums_that_the_clients_counted(scraped: Scraped, tmp_path: Path) -> None:
    assert not scraped.tally.problems
    assert scraped.kills
    sums = {
        name: sum(counts[name] for counts in scraped.tally.counted.values())
        for name in ("requests", "prompt_tokens", "completion_tokens")
    }
    with Prometheus(tmp_path, scraped) as prometheus:
        wait_until(lambda: prometheus.value('up{job="modelctl"}') == 1, what="it has scraped the gateway")
        for query, expected in {
            f"sum({PREFIX}request_success_total)": sums["requests"],
            f"sum({PREFIX}prompt_tokens_total)": sums["prompt_tokens"],
            f"sum({PREFIX}generation_tokens_total)": sums["completion_tokens"],
            f"sum({PREFIX}key_requests_total)": sums["requests"],
            f"sum({PREFIX}key_generation_tokens_total)": sums["completion_tokens"],
        }.items():
            wait_until(lambda query=query, expected=expected: prometheus.value(query) == expected, what=query)  # type: ignore[misc]
        assert prometheus.value(f"histogram_quantile(0.5, sum by (le) ({PREFIX}e2e_request_latency_seconds_bucket))")


def test_promtool_finds_nothing_to_change(scraped: Scraped) -> None:
    _, text = scraped.scrape()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_alerts_fire_when_they_should() -> None:
    checked = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=DEPLOY, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rules = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"][0]["rules"]
    tested = yaml.safe_load((DEPLOY / "rules_test.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tested for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules}


def test_every_query_can_be_read_and_names_metrics_that_exist(scraped: Scraped, tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [
        target["expr"].replace("$__rate_interval", "1m") for panel in panels for target in panel.get("targets", ())
    ]
    queries += [rule["expr"] for rule in yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"][0]["rules"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    families = set(re.findall(r"^# TYPE (\S+)", scraped.scrape()[1], re.MULTILINE))
    for query in queries:
        for name in re.findall(rf"{PREFIX}\w+", query):
            assert name.removesuffix("_bucket") in families, f"{name} in {query}"


def test_ready_workers_are_counted_by_machine(tmp_path: Path) -> None:
    (panel,) = (p for p in json.loads(DASHBOARD.read_text())["panels"] if p["title"] == "Workers that are ready")
    others, own = (re.sub(r"\$(instance|model)", ".*", target["expr"]) for target in panel["targets"])
    series, places = [], {"a 1": ("big-box", 1), "a 2": ("big-box", 1), "b 1": ("big-box", 0), "c 1": ("", 1)}
    for worker, (machine, ready) in places.items():
        model, replica = worker.split()
        labels = f'instance="desk:8000", job="modelctl", model="{model}", replica="{replica}"'
        for metric, value in (f'worker_node_info{{{labels}, node="{machine}"}}', 1), (
            f'worker_state{{{labels}, state="ready"}}', ready
        ):  # fmt: skip
            series.append({"series": PREFIX + metric, "values": str(value)})
    wanted = [(others, '{node="big-box"}', 2), (own, "{}", 1)]
    cases = [
        {"expr": expr, "eval_time": "0m", "exp_samples": [{"labels": labels, "value": value}]}
        for expr, labels, value in wanted
    ]
    file = tmp_path / "counted.yml"
    file.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": cases}]}))
    checked = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_dashboard_has_grafana_s_schema() -> None:
    """Read it with Grafana's own types, and write it again: nothing is lost and nothing is changed."""
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    written = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert differences(given, written) == []


def differences(given: object, written: object, place: str = "") -> list[str]:
    """Return the places of values that are missing, or others, in ``written``, which may have more keys."""
    if isinstance(given, dict) and isinstance(written, dict):
        return [
            found for key, value in given.items() for found in differences(value, written.get(key), f"{place}/{key}")
        ]
    if isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        pairs = enumerate(zip(given, written, strict=True))
        return [found for i, (one, other) in pairs for found in differences(one, other, f"{place}/{i}")]
    return [] if given == written else [place]
