"""models.yaml, the directories of models, ports, files of keys, and the supervisor that runs."""

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol.errors import ConnectionLost, WireError
from protocol.process.private_paths import NotPrivate, check_place, check_private
from supervisor.cli.doctor.findings import Finding, bad, ok, warn
from supervisor.cli.options import connect

if TYPE_CHECKING:
    from supervisor.config import Config, Examined

ANSWER_S: Final = 60.0
"""Seconds for the test generation."""
TOKENS: Final = 4
"""Tokens of its answer."""
PROMPT: Final = "Hello"


def file_of(examined: "Examined") -> Iterator[Finding]:
    """Judge models.yaml, and each model in it as its worker would before it loads."""
    from supervisor.cli.check import check_all

    checked = check_all(examined, elsewhere=False)
    for problem in (*checked.of_file, *checked.of_machine):
        yield bad("models.yaml", str(problem), "correct it, and run `modelctl check`")
    if not (checked.of_file or checked.of_machine):
        names = ", ".join(examined.config.models)
        yield ok("models.yaml", f"{examined.config.file}: {names}")


def directory_of(runtime_dir: Path) -> Iterator[Finding]:
    """Judge who can reach the directory of the sockets."""
    if not runtime_dir.exists():
        return
    try:
        check_place(runtime_dir)
        check_private(runtime_dir, runtime_dir.lstat(), or_roots=False)
    except (NotPrivate, OSError) as e:
        says, _, remedy = str(e).rpartition("; ")
        yield bad("permissions", says or str(e), remedy if says else "see the path")
    else:
        yield ok("permissions", f"{runtime_dir} is private")


def port_of(config: "Config", running: dict[str, Any] | None) -> Iterator[Finding]:
    """Judge the addresses of the gateway and of the port over TCP.

    running  the answer to ``status`` of the supervisor here; None if none runs
    """
    ours = (running or {}).get("supervisor") or {}
    if config.gateway is not None:
        address = config.gateway.listen
        yield _port("gateway", str(address), address.host, address.port, ours.get("gateway"))
    if (endpoint := config.supervisor.listen) is not None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        yield _port("supervisor.listen", endpoint, host.strip("[]"), int(port), ours.get("tcp"))


def _port(what: str, address: str, host: str, port: int, ours: dict[str, Any] | None) -> Finding:
    """Judge the address of a port.

    ours  the port in the answer to ``status``; None if no supervisor here has one
    """
    section = what.partition(".")[0]
    if ours and ours.get("listen") == address:
        if problem := ours.get("problem"):
            return bad(what, f"{address} does not answer: {problem}", f"see `modelctl logs {section}`")
        return ok(what, f"answers at {address}")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as e:
        why = "another program listens there" if e.errno == errno.EADDRINUSE else e.strerror or str(e)
        return bad(what, f"{address} cannot be opened: {why}", f"choose another address with {section}.listen")
    return ok(what, f"{address} is free")


def status_of(runtime_dir: Path) -> dict[str, Any] | None:
    """Return the answer to ``status`` of the supervisor here; None if none runs."""
    try:
        with connect(runtime_dir) as client:
            return client.status()
    except (ConnectionLost, WireError, TimeoutError, OSError):
        return None


def running_of(status: dict[str, Any] | None) -> Iterator[Finding]:
    """Judge the supervisor that runs, and its models."""
    if status is None:
        yield ok("supervisor", "none is running; `modelctl serve` starts one")
        return
    yield ok("supervisor", f"pid {status['supervisor']['pid']} is running")
    if trouble := status["supervisor"].get("log_trouble"):
        yield bad("logs", f"the log {trouble}", "free its disk")
    for model in status["models"]:
        if model["state"] in ("failed", "backoff"):
            says = f"is in state {model['state']}: {model['reason']}"
            yield bad(f"model {model['name']}", says, f"see `modelctl events {model['model']}`")


def generation_of(
    runtime_dir: Path, status: dict[str, Any] | None, progress: dict[str, Any] | None = None
) -> Iterator[Finding]:
    """Have one ready model generate some tokens.

    progress  map whose "done" is set to the number of tokens as they come
    """
    ready = [model["model"] for model in (status or {}).get("models", ()) if model["state"] == "ready"]
    if not ready:
        yield ok("test generation", "left out: no model is ready")
        return
    began = time.monotonic()
    try:
        with connect(runtime_dir) as client:
            stream = client.generate(ready[0], PROMPT, max_tokens=TOKENS, deadline_ms=int(1000 * ANSWER_S))
            for delta in stream:
                if progress is not None:
                    progress["done"] += len(delta.token_ids)
    except (WireError, TimeoutError, OSError) as e:
        yield bad("test generation", f"{ready[0]}: {e}", f"see `modelctl logs {ready[0]}`")
        return
    took = time.monotonic() - began
    tokens = stream.usage["completion_tokens"] if stream.usage else 0
    if tokens:
        yield ok("test generation", f"{ready[0]}: {tokens} tokens in {took:.2f} s")
    else:
        yield warn("test generation", f"{ready[0]} ended its answer at once", "ask it something: `modelctl run`")
