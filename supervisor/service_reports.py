"""What a service manager, such as systemd, is told about the supervisor, and when. Pure. ``service_manager`` sends it.

The lines are those of sd_notify(3).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from supervisor.workers.lifecycle import AT_REST, WorkerState

LOOK_S: Final = 0.25
"""Seconds between two looks at the workers. A look takes a few microseconds, and most looks send nothing."""
EXTEND_S: Final = 60.0
"""Seconds that the manager waits for the next message during a start, a reload or a shutdown. A large model may load,
and a drain may last, for as long as the loop is alive. A loop that is stuck is ended after this time."""
_EXTEND_AGAIN_S: Final = 10.0
_MOST_BYTES: Final = 500
"""Longest status text."""


class WorkerView(NamedTuple):
    """One worker, as the reports need it.

    awaited  whether the service is ready only when this worker is: it starts with the supervisor
    """

    name: str
    state: WorkerState
    awaited: bool


class View(NamedTuple):
    """The state of the supervisor at one look.

    gateway    the problem of the gateway, "" if it has none; None while the gateway has yet to serve for the first time
    listen     the problem of the port over TCP, "" if it has none. The service is ready without that port
    reloading  whether workers are being exchanged
    stopping   whether the supervisor shuts down
    """

    workers: Sequence[WorkerView]
    gateway: str | None = ""
    listen: str = ""
    reloading: bool = False
    stopping: bool = False


class ServiceReports:
    """Decides what the service manager is told, and when. Times are monotonic seconds, and the caller passes them.

    watchdog_s  seconds after which the manager kills a supervisor that has not sent WATCHDOG=1; None if it does not
    """

    def __init__(self, watchdog_s: float | None = None) -> None:
        self._feed_s = None if watchdog_s is None else watchdog_s / 2
        self._fed_at = self._extended_at = float("-inf")
        self._ready = self._reloading = self._stopping = False
        self._status = ""

    @property
    def look_s(self) -> float:
        """Seconds between two calls of ``due``."""
        return LOOK_S if self._feed_s is None else min(LOOK_S, self._feed_s / 2)

    def due(self, view: View, now: float) -> list[str]:
        """Return the lines of the message that is due now. Return none if the manager knows everything already."""
        lines = []
        if view.stopping:
            if not self._stopping:
                self._stopping = True
                lines.append("STOPPING=1")
        elif not self._ready:
            self._ready = is_up(view)
            lines += ["READY=1"] if self._ready else []
        elif view.reloading and not self._reloading:
            lines += self.reload_begins(now)
        elif self._reloading and not view.reloading:
            self._reloading = False
            lines.append("READY=1")
        if (status := status_text(view)) != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        settled = self._ready and not self._reloading and not self._stopping
        if not settled and now - self._extended_at >= _EXTEND_AGAIN_S:
            self._extended_at = now
            lines.append(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}")
        if self._feed_s is not None and now - self._fed_at >= self._feed_s:
            self._fed_at = now
            lines.append("WATCHDOG=1")
        return lines

    def reload_begins(self, now: float) -> list[str]:
        """Return the lines for the begin of a reload. Return none if the manager does not expect them now.

        READY=1 follows when ``due`` sees that nothing is being exchanged, also after a reload that was refused. A
        manager that has sent SIGHUP itself waits for both (Type=notify-reload).
        """
        if not self._ready or self._reloading or self._stopping:
            return []
        self._reloading = True
        return ["RELOADING=1", f"MONOTONIC_USEC={now * 1e6:.0f}"]


def is_up(view: View) -> bool:
    """Return whether the start is over: each worker that starts with the supervisor is ready or will not become ready
    by itself, and the gateway serves or has said why it does not."""
    settled = (*AT_REST, WorkerState.READY, WorkerState.ASLEEP)
    return view.gateway is not None and all(w.state in settled for w in view.workers if w.awaited)


def status_text(view: View) -> str:
    """Return what `systemctl status` shows about the supervisor: its problems, and the names of all workers, by their
    state."""
    by_state: dict[WorkerState, list[str]] = {}
    for worker in view.workers:
        by_state.setdefault(worker.state, []).append(worker.name)
    doing = "shutting down; " if view.stopping else "reloading; " if view.reloading else ""
    parts = [f"{len(by_state.get(WorkerState.READY, ()))} of {len(view.workers)} workers ready"]
    parts += [f"no gateway: {view.gateway}"] if view.gateway else []
    parts += [view.listen] if view.listen else []
    parts += [f"{state}: {', '.join(by_state[state])}" for state in WorkerState if state in by_state]
    text = " ".join((doing + "; ".join(parts)).split()).encode()
    return text.decode() if len(text) <= _MOST_BYTES else text[: _MOST_BYTES - 3].decode(errors="ignore") + "..."
