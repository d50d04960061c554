"""The metrics say what clients have counted, whatever happens to the workers, to those who may see them."""

import gzip
import http.client
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric

from protocol.metrics import PREFIX, compressed, counter, gauge, pieces
from supervisor.keys.rights import OWNER, Identity
from supervisor.requests.figures import HISTOGRAMS, MOST_ENDS, Histogram, RequestFigures
from supervisor.requests.stories import OTHER, RequestEnd, RequestRecord
from tests.cli.programs import MODELCTL
from tests.exporter.scraping import Scraped, counted, mixed_requests, parsed, total
from tests.gateway.running import Gateway
from tests.keyed import free_port
from tests.nvml_box import GIB
from tests.serving import ROOT, Serving, engine, wait_until


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with mixed_requests(120, 8, 0.6, seed) as scraped:
        yield scraped


def test_sums_are_what_the_clients_counted(scraped: Scraped) -> None:
    assert not scraped.tally.problems
    assert scraped.kills
    samples = scraped.samples()
    for (key, model), counts in counted(scraped.tally).items():
        for name, what in (("requests", "requests"), ("prompt_tokens", "prompt_tokens")):
            assert total(samples, f"{PREFIX}key_{name}_total", key=key, model=model) == counts[what], (key, name)
        got = total(samples, f"{PREFIX}key_generation_tokens_total", key=key, model=model)
        assert got == counts["completion_tokens"], key
    all_of = {name: sum(c[name] for c in scraped.tally.counted.values()) for name in ("requests", "prompt_tokens")}
    assert total(samples, f"{PREFIX}request_success_total") == all_of["requests"]
    assert total(samples, f"{PREFIX}request_errors_total") == 0
    assert total(samples, f"{PREFIX}prompt_tokens_total") == all_of["prompt_tokens"]
    assert total(samples, f"{PREFIX}e2e_request_latency_seconds_count") <= all_of["requests"]
    wait_until(lambda: total(scraped.samples(), f"{PREFIX}worker_restarts_total") >= scraped.kills)
    assert total(samples, f"{PREFIX}events_total", kind="death") >= scraped.kills


def test_histograms_are_cumulative_and_complete(scraped: Scraped) -> None:
    samples = scraped.samples()
    for name in HISTOGRAMS:
        buckets = [
            (float(dict(labels)["le"]), value) for (found, labels), value in samples.items()
            if found == f"{PREFIX}{name}_bucket"
        ]  # fmt: skip
        values = [value for _, value in sorted(buckets)]
        assert values == sorted(values)
        assert values[-1] == total(samples, f"{PREFIX}{name}_count") > 0, name


def test_metrics_take_the_right_status(scraped: Scraped) -> None:
    status, text = scraped.scrape(scraped.web)
    assert status == 403
    assert "verb 'metrics' takes the right status or admin" in text
    assert "`modelctl keys new NAME --http --rights status`" in text
    assert scraped.scrape("mctl_unknown")[0] == 401


def test_states_and_workers(scraped: Scraped) -> None:
    wait_until(lambda: total(scraped.samples(), f"{PREFIX}worker_state", state="ready") == 2)
    samples = scraped.samples()
    assert total(samples, f"{PREFIX}worker_state") == 2
    assert {dict(labels)["replica"] for name, labels in samples if name == f"{PREFIX}worker_state"} == {"1", "2"}
    assert total(samples, f"{PREFIX}num_requests_running") == total(samples, f"{PREFIX}num_requests_waiting") == 0


def test_the_command_prints_and_serves_metrics() -> None:
    port = free_port()
    with Serving({"a": engine()}) as serving:
        printed = serving.modelctl("metrics")
        assert printed.returncode == 0
        assert total(parsed(printed.stdout), f"{PREFIX}worker_state", state="ready") == 1
        command = [*map(str, MODELCTL), "metrics", "--listen", str(port), "--runtime-dir", str(serving.runtime_dir)]
        with subprocess.Popen(command, env=serving.environment, stderr=subprocess.PIPE, text=True) as served:
            try:
                assert served.stderr is not None
                assert f"127.0.0.1:{port}/metrics" in served.stderr.readline()
                text, encoding = scrape(port, "")
                assert encoding is None
                packed, encoding = scrape(port, "gzip")
                assert encoding == "gzip"
                assert parsed(gzip.decompress(packed).decode()).keys() == parsed(text.decode()).keys()
                assert fetch(port, "/other")[0] == 404
                serving.kill()
                wait_until(lambda: fetch(port, "/metrics")[0] == 503)
                serving.start_again({"a": engine()})
                wait_until(lambda: fetch(port, "/metrics")[0] == 200)
            finally:
                served.send_signal(signal.SIGINT)
            assert served.wait(timeout=30) == 130
        refused = serving.modelctl("metrics", "--listen", "example.org:1")
        assert (refused.returncode, "--listen example.org:1" in refused.stderr) == (2, True)


def test_a_worker_that_sleeps_shows_its_host_memory_and_its_last_wake() -> None:
    models = {"a": {"model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "autostart": True}}
    with Serving(models) as serving:

        def seen() -> tuple[float, list[float]]:
            samples = parsed(serving.modelctl("metrics").stdout)
            wakes = [value for (name, _), value in samples.items() if name == f"{PREFIX}worker_wake_seconds"]
            return total(samples, f"{PREFIX}worker_host_bytes", model="a", replica="1"), wakes

        assert seen() == (0, [])
        serving.order("sleep", model="a")
        serving.wait_state("a", "asleep")
        assert seen() == (GIB, [])
        serving.order("wake", model="a")
        status = serving.wait_state("a", "ready")
        assert seen() == (status["host_bytes"], [status["wake_s"]])


def test_models_that_were_never_asked_have_no_histograms() -> None:
    models = {f"m{number:03}": engine(lazy=True) for number in range(200)}
    with Serving(models, wait=False) as serving, Gateway(serving, auth="none") as gateway:
        wait_until(lambda: is_up(gateway.port), what="the gateway")
        with serving.client() as client:
            client.complete("m007", "x", max_tokens=2)
        text, encoding = scrape(gateway.port, "")
        samples = parsed(text.decode())
        assert encoding is None
        with_buckets = {dict(labels)["model"] for name, labels in samples if name.endswith("_bucket")}
        assert with_buckets == {"m007"}
        assert total(samples, f"{PREFIX}worker_state") == len(models), "each is in one state"
        assert len(samples) < 35 * len(models)
        packed, encoding = scrape(gateway.port, "deflate, gzip;q=0.5")
        assert encoding == "gzip"
        assert parsed(gzip.decompress(packed).decode()).keys() == samples.keys()
        assert len(packed) < len(text) / 10
        assert scrape(gateway.port, "gzip;q=0, deflate")[1] is None


def test_metrics_are_made_once_a_second() -> None:
    with Serving({"a": engine()}) as serving, Gateway(serving, auth="none") as gateway:
        wait_until(lambda: is_up(gateway.port), what="the gateway")
        began, made, scrapes = time.monotonic(), set(), 0
        while time.monotonic() < began + 3:
            samples = parsed(scrape(gateway.port, "")[0].decode())
            made.add(samples[f"{PREFIX}uptime_seconds", frozenset()])
            scrapes += 1
        assert 2 <= len(made) <= time.monotonic() - began + 1, f"{scrapes} scrapes"


def test_the_text_comes_in_pieces_and_is_that_of_the_official_package() -> None:
    family = gauge("x", "Help with \\ and\na line.", "model", "state")
    for number in range(1100):
        family.add_metric([f'm"{number}\\', "a\nb"], number / 3)
    seen = counter("seen", "Seen.", "key")
    seen.add_metric(["k"], 1e9)
    histogram = HistogramMetricFamily(f"{PREFIX}h", "H.", labels=["model"])
    histogram.add_metric(["m"], [("0.5", 1.0), ("+Inf", 3.0)], 2.5)

    class Found:
        def collect(self) -> list[Metric]:
            return [family, seen, histogram, gauge("empty", "Without samples.")]

    found = list(pieces(Found().collect()))
    assert max(piece.count(b"\n") for piece in found) <= 501
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found())
    official: bytes = generate_latest(registry)
    text = b"".join(found).decode()
    assert parsed(text) == parsed(official.decode())
    assert re.findall("^#.*$", text, re.MULTILINE) == re.findall("^#.*$", official.decode(), re.MULTILINE)
    assert gzip.decompress(b"".join(compressed(found))).decode() == text


def is_up(port: int) -> bool:
    try:
        return fetch(port, "/readyz")[0] in (200, 503)
    except OSError:
        return False


def scrape(port: int, encoding: str) -> tuple[bytes, str | None]:
    """Return the body of /metrics, and its header Content-Encoding. ``encoding``: the header Accept-Encoding."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/metrics", headers={"accept-encoding": encoding})
        response = connection.getresponse()
        assert response.status == 200
        return response.read(), response.headers.get("content-encoding")


def fetch(port: int, path: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


# the figures


def test_a_value_lies_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 2.0001, 7):
        histogram.add(value)
    histogram.add(4, 3)
    assert (histogram.counts, histogram.sum) == ([2, 2, 4, 1], pytest.approx(25.5001))


def a_record(end: RequestEnd, owner: Identity = OWNER, resumes: int = 0) -> RequestRecord:
    return RequestRecord("1-1", (), "m", owner, "normal", 7, 8, 5, resumes, 10.0, 10.0, 10.1, (), end=end, ended=10.5)


def test_times_of_an_answer_that_another_worker_began_are_left_out() -> None:
    figures = RequestFigures()
    body = {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 3},
        "timings": {"queue_ms": 10.0, "prefill_ms": 20.0, "decode_ms": 400.0},
    }
    end = RequestEnd.of_worker(body, failed=False)
    figures.add(a_record(end, Identity("web", "id of web")))
    figures.add(a_record(end, resumes=1))
    found = figures.describe()
    counts = {name: sum(each["counts"]) for name, each in found["histograms"].items()}
    assert counts == {
        "time_to_first_token_seconds": 1, "inter_token_latency_seconds": 4, "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2, "request_prefill_time_seconds": 1, "request_decode_time_seconds": 1,
        "request_prompt_tokens": 2, "request_generation_tokens": 2,
    }  # fmt: skip
    assert found["histograms"]["time_to_first_token_seconds"]["sum"] == pytest.approx(0.1)
    assert found["tokens"]["cached"] == 6
    assert found["keys"] == [["web", 1, 7, 5], ["", 1, 7, 5]]


def test_what_a_worker_may_say_is_bounded() -> None:
    figures = RequestFigures()
    wrong = {"finish_reason": 5, "usage": "x", "timings": {"queue_ms": "x", "decode_ms": -1, "prefill_ms": 1e300}}
    figures.add(a_record(RequestEnd.of_worker(wrong, failed=False)))
    for number in range(3 * MOST_ENDS):
        key = Identity(f"key {number}", f"id {number}")
        figures.add(a_record(RequestEnd.of_worker({"finish_reason": f"reason {number}"}, failed=False), key))
        figures.add(a_record(RequestEnd(error=f"error {number}"), key))
    found = figures.describe()
    assert max(len(found[name]) for name in ("ends", "errors", "keys")) <= MOST_ENDS + 1
    assert sum(found["ends"].values()) == 3 * MOST_ENDS + 1
    assert found["errors"][OTHER] == 2 * MOST_ENDS
    assert sum(requests for _, requests, _, _ in found["keys"]) == 6 * MOST_ENDS + 1
    assert found["keys"][-1][0] == OTHER


def test_the_page_metrics_names_every_metric_and_no_other(scraped: Scraped) -> None:
    families = set(re.findall(r"^# TYPE (\S+)", scraped.scrape()[1], re.MULTILINE))
    named = set(re.findall(rf"`({PREFIX}\w+)`", (ROOT / "docs" / "operate.md").read_text()))
    assert named == families
