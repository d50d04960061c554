"""Send large bodies that are refused to a real gateway, and say how much its memory has grown.

    python -m tests.chaos.refused_bodies RUNTIME_DIR MODEL SECRET

The gateway is a client of the supervisor in RUNTIME_DIR, whatever happens to that meanwhile. It ends with this process.
The last line is ``Refused`` as JSON. SECRET is in every body.
"""

import http.client
import json
import os
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from tests.gateway.running import Gateway, is_live
from tests.serving import WITHIN, Serving, wait_until

MIB = 1 << 20
GROWTH_MIB = 64
"""MiB by which the gateway may grow. Without the cure each body of 15 MiB kept 45."""
LARGE, MIDDLE = 15 * MIB, 5 * MIB // 2
"""Sizes of bodies. A request of the first is too large for the supervisor, and the gateway refuses it."""
ROUNDS = 2
WAITS: dict[str, Any] = {"queue_ms": 3000, "deadline_ms": 5000}
"""The worker refuses some of the requests, and it may be dead."""


@dataclass
class Refused:
    """What the gateway has answered, and its resident MiB before and after that."""

    statuses: dict[str, int]
    before: int
    after: int

    @property
    def problem(self) -> str | None:
        """What is wrong, or None."""
        if answered := {status for status in self.statuses if int(status) < 400}:
            return f"requests were answered with {answered}: {self.statuses}"
        if self.after > self.before + GROWTH_MIB:
            return f"{self.after} MiB, {self.before} before: {self.statuses}"
        return None


def _requests(model: str, text: str, large: int, middle: int) -> list[tuple[str, bytes]]:
    """Return the path and the body of requests that the gateway refuses, and the supervisor, and the worker."""
    long, shorter = text + " x" * (large // 2), text + " x" * (middle // 2)
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 3}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"model": model, "prompt": long, "temperature": -5}),
        ("chat/completions", {"model": model, "stream": True, "temperature": -5, **chat}),
        ("messages", {"model": model, "temperature": -5, **chat}),
        ("completions", {"model": "nosuch", "prompt": shorter}),
        ("completions", {"model": model, "prompt": shorter, "temperature": -5, **WAITS}),
    ]
    packed = [(f"/v1/{path}", json.dumps(body).encode()) for path, body in bodies]
    return [*packed, ("/v1/completions", b'{"prompt": "' + long.encode())]


def _refuse(port: int, requests: list[tuple[str, bytes]]) -> Counter[str]:
    """Send requests on one connection. Return how often each status was answered."""
    statuses: Counter[str] = Counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        for path, body in requests:
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
            statuses[str(response.status)] += 1
    return statuses


def main() -> None:
    runtime_dir, model, secret = sys.argv[1:]
    served = SimpleNamespace(runtime_dir=Path(runtime_dir), environment=dict(os.environ))
    with Gateway(cast(Serving, served), parent=os.getpid()) as gateway:
        wait_until(lambda: is_live(gateway.port), what="the gateway")
        process = psutil.Process(gateway.process.pid)
        _refuse(gateway.port, _requests(model, secret, 100, 100))  # imports modules
        before = process.memory_info().rss // MIB
        statuses = _refuse(gateway.port, _requests(model, secret, LARGE, MIDDLE) * ROUNDS)
        print(json.dumps(asdict(Refused(dict(statuses), before, process.memory_info().rss // MIB))))


if __name__ == "__main__":
    main()
