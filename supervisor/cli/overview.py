"""The short form of `status`: the values that people look for first, in some ten lines a model. Pure.

Unknown values take no line. ``figures`` has all values, for `status --verbose`.
"""

from collections.abc import Mapping
from typing import Any

from supervisor.cli import figures
from supervisor.spelling import duration, size

Values = Mapping[str, Any]
Entries = list[tuple[str, list[str]]]
"""Labels, each with one or more lines of text."""
_TROUBLE = {
    "handshakes_failed": "handshakes failed",
    "connections_denied": "connections denied",
    "bad_frames": "bad frames",
    "worker_frames_dropped": "frames of workers dropped",
}
"""Counters that are worth a line once they are not zero."""


def of_supervisor(s: Values) -> Entries:
    """Return the lines about the supervisor."""
    counters = s["counters"]
    found = {
        "process": f"pid {s['pid']}, version {s['version']}, up for {duration(s['uptime_s'])}",
        "shutting down": "yes" if s.get("shutting_down") else None,
        "config": s["config"],
        "runtime_dir": s["runtime_dir"],
        "log": s.get("log_trouble"),
        "usage": (s.get("usage") or {}).get("trouble"),
        "spares": ", ".join(
            f"{one['engine']} (pid {one['pid']})" if one["ready"] else f"{one['engine']} (importing)"
            for one in s.get("spares") or ()
        ),
        "clients": figures.counted(s["connections"], "connection"),
        "forwarding": None if s.get("forwarding") == "compiled" else s.get("forwarding"),
        "orders": ", ".join(t["cause"] for t in s.get("turnovers") or () if t["running"]),
        "trouble": ", ".join(f"{counters[key]} {what}" for key, what in _TROUBLE.items() if counters.get(key)),
    }
    return [*_entries(found), *figures.lines({key: s[key] for key in ("tcp", "gateway") if s.get(key)})]


def of_model(m: Values) -> Entries:
    """Return the lines about one worker."""
    return _entries(
        {
            "state": _state(m),
            "reason": m.get("reason"),
            "description": m.get("description"),
            "also called": figures.other_names(m),
            "found below": m.get("folder"),
            "last exit": _last_exit(m),
            "engine": f"{m['engine']} on {_place(m)}",
            "attention": m.get("attention"),
            "decoding": m.get("decoding"),
            "context": _context(m),
            "template": m.get("template"),
            "vram": _vram(m),
            "requests": _requests(m),
            "cache": _cache(m.get("engine_stats") or {}),
            "so far": _totals(m["totals"]),
            "process": _process(m),
            "log": m["log"],
        }
    )


def _entries(found: Mapping[str, str | None]) -> Entries:
    return [(label, [text]) for label, text in found.items() if text]


def _state(m: Values) -> str:
    text = f"{m['state']} for {duration(m['state_s'])}"
    if progress := m.get("progress"):
        return f"{text}, {figures.progress(progress)}"
    if m["state"] == "ready" and (seconds := m.get("load_seconds")) is not None:
        text += f", loaded in {figures.seconds(seconds)}"
        text += ", can sleep" if m.get("can_sleep") else ""
    if m["state"] == "asleep":
        text += f", {size(m['host_bytes'])} of host memory"
    if (seconds := m.get("wake_s")) is not None:
        text += f", last woken in {figures.seconds(seconds)}"
    return f"{text}, until it is unloaded {duration(m['until_s'])}" if m.get("until_s") is not None else text


def _last_exit(m: Values) -> str | None:
    """Return how the last process ended, without a message that the reason repeats; None if it was stopped by order."""
    last = m.get("last_exit")
    if not last or last["reason"] == "asked":
        return None
    kind = f"{last['reason']} (exit code {last['code']})"
    return kind if last["message"] == m.get("reason") else f"{kind}: {last['message']}"


def _place(m: Values) -> str:
    place = _device(m)
    return f"machine {m['node']}, {place}" if m.get("node") else place


def _device(m: Values) -> str:
    device = m.get("device")
    if m["gpu"] == "cpu":
        return device or "cpu"
    gpus = ", ".join(map(str, m["placed"])) if m.get("placed") else m["gpu"]
    return f"GPU {gpus}" + (f" ({device})" if device else "")


def _context(m: Values) -> str:
    parts = [figures.counted(m["context"], "token")] if m["context"] is not None else []
    parts.append(f"{figures.counted(m['max_batch_size'], 'request')} at once")
    if m.get("chat") is not None:
        parts.append("with a chat template" if m["chat"] else "no chat template")
    return ", ".join(parts)


def _vram(m: Values) -> str | None:
    held, estimated = m.get("vram_bytes"), m.get("vram_estimate_bytes")
    parts = [f"{size(held)} held"] if held is not None else []
    parts += [f"{size(estimated)} estimated"] if estimated else []
    if m.get("vram_return") in ("awaited", "not back"):
        parts.append(f"that of the last process is {'not back yet' if m['vram_return'] == 'awaited' else 'not back'}")
    return ", ".join(parts) or None


def _requests(m: Values) -> str:
    text = f"{m['active']} active, {m['queued']} queued"
    if m.get("idle_s") is not None:
        return f"{text}, idle for {duration(m['idle_s'])}"
    return f"{text}, {m['tokens_per_s']} tokens/s" if m["active"] else text


def _cache(stats: Values) -> str | None:
    head = "cache: "
    return next((line.removeprefix(head) for line in figures.engine_lines(stats) if line.startswith(head)), None)


def _totals(totals: Values) -> str:
    text = f"{figures.counted(totals['finished'], 'request')} finished, {totals['tokens']} tokens"
    more = {"ended with an error": totals.get("errors"), "resumed after a worker's death": totals.get("resumed")}
    return ", ".join([text, *(f"{count} {what}" for what, count in more.items() if count)])


def _process(m: Values) -> str | None:
    restarts = figures.counted(m["restarts"], "restart") if m["restarts"] else ""
    pid = f"pid {m['pid']}" if m["pid"] else ""  # 0: the worker's machine has not answered yet
    return ", ".join(filter(None, (pid, restarts))) or None
