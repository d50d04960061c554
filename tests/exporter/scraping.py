"""A supervisor and its gateway under mixed requests with kills of workers, and its metrics as a map."""

import http.client
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.usage_ledger import KEYS, SECTIONS, echo, kill_workers, wait_live
from benchmarks.usage_requests import Mixed, Tally
from tests.keyed import Keyed, free_port

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(name, labels) → value."""


@dataclass
class Scraped:
    """A gateway whose metrics can be read.

    watcher  the token of a key with the right status
    tally    what the clients have counted
    kills    workers that were killed meanwhile
    """

    keyed: Keyed
    port: int
    watcher: str
    web: str
    tally: Tally
    kills: int

    def scrape(self, token: str | None = None) -> tuple[int, str]:
        """Return status and text of /metrics. ``token``: of another key than the watcher's."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/metrics", headers={"authorization": f"Bearer {token or self.watcher}"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def samples(self) -> Samples:
        status, text = self.scrape()
        assert status == 200, text
        return parsed(text)


def parsed(text: str) -> Samples:
    """Return the samples of a text in Prometheus' format."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of all samples of a metric that have these labels."""
    wanted = set(labels.items())
    return sum(value for (found, own), value in samples.items() if found == name and wanted <= own)


@contextmanager
def mixed_requests(requests: int, threads: int, every_s: float, seed: int) -> Iterator[Scraped]:
    """Make requests while workers are killed. When all have ended, let the caller look at the metrics."""
    port = free_port()
    with Keyed({"echo": echo(0.003)}, KEYS, gateway={"listen": port}, **SECTIONS) as keyed:
        tokens = {name: keyed.new_http(name) for name in ("web", "phone")}
        watcher = keyed.new_http("watcher", rights="status")
        wait_live(port)
        mixed = Mixed(port, tokens, keyed.serving.client)
        done = threading.Event()

        def ask() -> None:
            try:
                mixed.ask(requests, threads, seed)
            finally:
                done.set()

        asking = threading.Thread(target=ask)
        asking.start()
        kills = kill_workers(keyed, done, every_s, random.Random(seed), mixed.tally)
        asking.join()
        yield Scraped(keyed, port, watcher, tokens["web"], mixed.tally, kills)


def counted(tally: Tally) -> dict[tuple[str, str], Counter[str]]:
    """Return what the clients counted, with the labels key and model as the metrics have them."""
    return {(key or "", model): counts for (key, model), counts in tally.counted.items()}
