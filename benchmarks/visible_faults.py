"""Measure how soon each fault is to be seen after the supervisor has detected it.

    python -m benchmarks.visible_faults

A fault is detected when the supervisor notes an event of it. From then on ``status`` (which ``ps`` shows), ``events``,
``/readyz?model=`` and ``/metrics`` are asked every STEP_S seconds, until each of them tells of the fault. The figure of
each is the time from the event to the first answer that tells of it. A hang is detected when its lease is over, so the
lease itself does not count.

A supervisor of its own serves each fault, with a gateway. Where a fault leaves a model able to answer, ``/readyz``
stays 200, and is not asked. The lost GPU is that of the tests' stand-in for NVML.
"""

import os
import resource
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from modelctl import Client
from protocol.errors import WireError
from supervisor.keys.store import KeyStore
from tests.keyed import Keyed, free_port
from tests.nvml_box import Box
from tests.serving import ROOT, Serving, engine, wait_until

STEP_S, WITHIN_S, ROUNDS = 0.01, 30.0, 5
TARGET_S = 2.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    kind     the kind of its event, and ``words`` that the event's message has
    status   whether an answer to ``status`` tells of it
    metrics  a text that the metrics have then
    readyz   whether ``/readyz?model=a`` is 503 then
    """

    name: str
    cause: Callable[[Serving], None]
    kind: str
    words: str
    status: Callable[[dict[str, Any]], bool]
    metrics: str
    readyz: bool = False


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    results: list[Result] = []
    for fault, served in _faults():
        seen: dict[str, list[float]] = {}
        for _ in range(rounds):
            with served() as serving:
                for where, seconds in _seen(serving, fault).items():
                    seen.setdefault(where, []).append(seconds)
        for where, times in seen.items():
            results.append(Result(f"{fault.name}: {where}, the slowest of {rounds}", max(times), "s", f"<= {TARGET_S}"))
    write("visible-faults", results, arguments.out)


def _seen(serving: Serving, fault: Fault) -> dict[str, float]:
    """Cause a fault. Return the seconds from its detection until each way of looking tells of it."""
    port = serving.overview()["supervisor"]["gateway"]["listen"].rpartition(":")[2]
    with Client(runtime_dir=serving.runtime_dir, admin=True) as client:
        before = client.call("events", limit=1)["last"]

        def noted() -> dict[str, Any] | None:
            found = client.call("events", after=before, limit=512)["events"]
            return next((e for e in found if e["kind"] == fault.kind and fault.words in e["message"]), None)

        looks: dict[str, Callable[[], bool]] = {
            "status": lambda: fault.status(client.status()),
            "events": lambda: noted() is not None,
            "/metrics": lambda: fault.metrics in _get(port, "/metrics")[1],
        }
        if fault.readyz:
            looks["/readyz"] = lambda: _get(port, "/readyz?model=a")[0] == 503
        fault.cause(serving)
        first: dict[str, float] = {}
        until = time.monotonic() + WITHIN_S
        while len(first) < len(looks):
            if time.monotonic() > until:
                raise SystemExit(f"{fault.name}: not seen by {looks.keys() - first.keys()} within {WITHIN_S:g} s")
            for where, look in looks.items():
                if where not in first and look():
                    first[where] = time.time()
            time.sleep(STEP_S)
        event = noted()
        assert event is not None
        return {where: max(0.0, at - event["time"]) for where, at in first.items()}


def _get(port: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def _of(answer: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = next(m for m in answer["models"] if m["model"] == "a")
    return model


def _troubled(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda answer: name in answer["supervisor"]["troubles"]


def _ask(*prompts: str, **options: Any) -> Callable[[Serving], None]:
    """Return a cause: requests whose answers nobody awaits."""

    def cause(serving: Serving) -> None:
        client = serving.client()
        serving.kept.append(client)
        for prompt in prompts:
            serving.kept.append(client.generate("a", prompt, max_tokens=500, **options))

    return cause


def _full_disk(serving: Serving) -> None:
    before = resource.prlimit(serving.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(serving.pid, resource.RLIMIT_FSIZE, (1, before[1]))
    serving.order("restart", model="a")


def _wrong_file(serving: Serving) -> None:
    serving.config.write_text(serving.config.read_text() + "nonsense: 1\n")
    with suppress(WireError):
        serving.order("reload")


def _faults() -> Iterator[tuple[Fault, Callable[[], Any]]]:
    """Yield each fault, and how to serve the models for it."""

    def plain(**keys: Any) -> Callable[[], Any]:
        settings = {name: keys.pop(name) for name in ("watch", "restart") if name in keys}
        kind = keys.pop("kind", "DeterministicEngine")
        return lambda: _with_gateway({"a": engine(kind, **keys)}, **settings)

    yield (
        Fault(
            "a model hangs", _ask("bad"), "hang", "no progress", lambda s: _of(s)["restarts"] > 0,
            'modelctl_events_total{kind="hang"} 1.0', readyz=True,
        ),
        plain(kind="HangsAtToken", watch={"step": "1s"}),
    )  # fmt: skip
    yield (
        Fault(
            "a crash loop", _ask("bad 1", "bad 2", "bad 3"), "state", "-> failed",
            lambda s: _of(s)["state"] == "failed",
            'modelctl_worker_state{model="a",replica="1",state="failed"} 1.0', readyz=True,
        ),
        plain(kind="RaisesAtToken", restart={"limit": 1}),
    )  # fmt: skip
    yield (
        Fault("a full disk", _full_disk, "log", "cannot be written", _troubled("log"),
              'modelctl_trouble{kind="log"} 1.0'),
        plain(),
    )  # fmt: skip
    yield (
        Fault(
            "a full queue", _ask(*map(str, range(9))), "queue", "queues are full", _troubled("queue"),
            'modelctl_trouble{kind="queue"} 1.0',
        ),
        plain(step_s=0.05, max_batch_size=1, max_queue=1),
    )  # fmt: skip
    yield (
        Fault(
            "a wrong models.yaml", _wrong_file, "reload", "nothing is changed", _troubled("config"),
            'modelctl_trouble{kind="config"} 1.0',
        ),
        plain(),
    )  # fmt: skip
    with TemporaryDirectory() as directory:
        box = Box(Path(directory) / "box.json")
        os.environ["MODELCTL_TEST_BOX"] = str(Path(directory) / "box.json")
        os.environ["PYTHONPATH"] = str(ROOT / "tests" / "stand_in_nvml")
        yield (
            Fault(
                "a lost GPU", lambda _: box.fails("GPU is lost"), "vram", "GPU is lost", _troubled("gpus"),
                'modelctl_trouble{kind="gpus"} 1.0',
            ),
            lambda: _with_box(box),
        )  # fmt: skip
        del os.environ["PYTHONPATH"]
    yield (
        Fault(
            "a revoked key", _revoke, "keys", "gone: user",
            lambda s: all(key["name"] != "user" for key in s["supervisor"]["tcp"]["keys"]),
            'modelctl_events_total{kind="keys"}',
        ),
        _keyed,
    )  # fmt: skip


@contextmanager
def _with_gateway(models: dict[str, Any], **settings: Any) -> Iterator[Serving]:
    port = free_port()
    with Serving(models, gateway={"listen": f"127.0.0.1:{port}", "auth": "none"}, **settings) as serving:
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], 30, "the gateway")
        yield serving


@contextmanager
def _with_box(box: Box) -> Iterator[Serving]:
    box.fails(None)
    with _with_gateway({"a": engine(gpu=0)}) as serving:
        yield serving


@contextmanager
def _keyed() -> Iterator[Serving]:
    gateway = {"listen": f"127.0.0.1:{free_port()}", "auth": "none"}
    with Keyed({"a": engine()}, {"user": "infer", "ops": "status"}, gateway=gateway) as keyed:
        wait_until(lambda: keyed.serving.overview()["supervisor"]["gateway"]["ready"], 30, "the gateway")
        with Client(endpoint=keyed.endpoint, key=keyed.keys["user"]) as client:
            client.complete("a", "x", max_tokens=1)
            keyed.serving.kept.append(keyed.store)
            yield keyed.serving


def _revoke(serving: Serving) -> None:
    store = next(kept for kept in serving.kept if isinstance(kept, KeyStore))
    store.revoke("user")


if __name__ == "__main__":
    main()
