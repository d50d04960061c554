"""The commands ps, status and cluster."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from modelctl.cli import options, root, tables
from modelctl.cli.options import connect, json_options, show, watch
from modelctl.cli.root import command, completed
from modelctl.cli.tables import Column, clean, table, wrapped
from supervisor.config.spelling import duration, percentage_of, size

if TYPE_CHECKING:
    from protocol.client.sync_client import Client


# The short form of `status`: the values that people look for first, in some ten lines a model. Pure.
#
# Unknown values take no line. ``figures`` has all values, for `status --verbose`.


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


def supervisor_entries(s: Values) -> Entries:
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
        "clients": tables.counted(s["connections"], "connection"),
        "forwarding": None if s.get("forwarding") == "compiled" else s.get("forwarding"),
        "orders": ", ".join(t["cause"] for t in s.get("turnovers") or () if t["running"]),
        "trouble": ", ".join(f"{counters[key]} {what}" for key, what in _TROUBLE.items() if counters.get(key)),
    }
    return [*_entries(found), *tables.lines({key: s[key] for key in ("tcp", "gateway") if s.get(key)})]


def of_model(m: Values) -> Entries:
    """Return the lines about one worker."""
    return _entries(
        {
            "state": _state(m),
            "reason": m.get("reason"),
            "description": m.get("description"),
            "also called": tables.other_names(m),
            "found below": m.get("folder"),
            "last exit": _last_exit(m),
            "engine": f"{m['engine']} on {_place(m)}",
            "attention": m.get("attention"),
            "decoding": m.get("decoding"),
            "context": _context(m),
            "template": m.get("template"),
            "vram": _vram_in_words(m),
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
        return f"{text}, {tables.progress(progress)}"
    if m["state"] == "ready" and (seconds := m.get("load_seconds")) is not None:
        text += f", loaded in {tables.seconds(seconds)}"
        text += ", can sleep" if m.get("can_sleep") else ""
    if m["state"] == "asleep":
        text += f", {size(m['host_bytes'])} of host memory"
    if (seconds := m.get("wake_s")) is not None:
        text += f", last woken in {tables.seconds(seconds)}"
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
    parts = [tables.counted(m["context"], "token")] if m["context"] is not None else []
    parts.append(f"{tables.counted(m['max_batch_size'], 'request')} at once")
    if m.get("chat") is not None:
        parts.append("with a chat template" if m["chat"] else "no chat template")
    return ", ".join(parts)


def _vram_in_words(m: Values) -> str | None:
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
    return next((line.removeprefix(head) for line in tables.engine_lines(stats) if line.startswith(head)), None)


def _totals(totals: Values) -> str:
    text = f"{tables.counted(totals['finished'], 'request')} finished, {totals['tokens']} tokens"
    more = {"ended with an error": totals.get("errors"), "resumed after a worker's death": totals.get("resumed")}
    return ", ".join([text, *(f"{count} {what}" for what, count in more.items() if count)])


def _process(m: Values) -> str | None:
    restarts = tables.counted(m["restarts"], "restart") if m["restarts"] else ""
    pid = f"pid {m['pid']}" if m["pid"] else ""  # 0: the worker's machine has not answered yet
    return ", ".join(filter(None, (pid, restarts))) or None


PS = (
    Column("NAME"), Column("STATE", state=True), Column("NODE", drop=4, rare=True), Column("GPU", drop=4),
    Column("VRAM(EST)", drop=6), Column("CTX", drop=11), Column("ACTIVE", drop=1), Column("QUEUED", drop=2),
    Column("TOK/S", drop=3), Column("IDLE", drop=8), Column("UNTIL", drop=9), Column("PID", drop=10),
    Column("SINCE", drop=5), Column("RESTARTS", drop=12), Column("CACHE", drop=13, right=True),
    Column("ALSO CALLED", drop=14, least=16, rare=True), Column("FOLDER", drop=15, rare=True),
    Column("REASON", drop=7, least=30),
)  # fmt: skip
UNWELL = ("failed", "backoff")


@command(
    ("modelctl ps 'llama-*' --watch", "List some models, and look again each second"),
    ("modelctl ps --connect tcp://192.168.1.5:5570 --key-file ops.key", "List those of another machine"),
)
@options.some
@watch
@json_options
def ps(models: tuple[str, ...], watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the models, or each MODEL: names, or quoted patterns such as 'llama-*'.

    A narrow terminal shows fewer columns. A pipe gets all of them.
    """
    with connect(runtime_dir, admin=True) as client:
        show(lambda: _read(client, models)["models"], ps_text, as_json=as_json, again=watch)


def _read(client: "Client", models: Sequence[str]) -> dict[str, Any]:
    answer = options.status_of(client, models)
    warn_of_troubles(answer)
    return answer


def ps_text(models: list[dict[str, Any]], width: int | None) -> str:
    """Return the table of the models, and below it the failures' reasons that it does not show in full.

    width  columns of the terminal; None: all columns
    """

    def shown(reasons: Sequence[str]) -> str:
        rows = [_ps_row(m, reason, in_words=width is not None) for m, reason in zip(models, reasons, strict=True)]
        return table(PS, rows, width)

    reasons = [clean(completed(m.get("reason") or "-")) for m in models]
    whole = shown(reasons)
    of = dict(zip((m["name"] for m in models), reasons, strict=True))
    below = {m["name"] for m in models if m["state"] in UNWELL and of[m["name"]] not in whole}
    if not below:
        return whole
    kept = ["see below" if name in below else reason for name, reason in of.items()]
    texts = [wrapped(f"{name}: {reason}", width, 2) for name, reason in of.items() if name in below]
    return "\n".join([shown(kept), "", *texts])


@command(
    ("modelctl status llama-8b --verbose", "Show everything that is known of one model"),
)
@options.some
@click.option("-v", "--verbose", is_flag=True, help="Show everything that is known.")
@watch
@json_options
def status(models: tuple[str, ...], verbose: bool, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show the supervisor and its models, or each MODEL: names, or quoted patterns such as 'llama-*'.

    Without --verbose, only known values and problems are shown.
    """
    with connect(runtime_dir, admin=True) as client:
        text = partial(status_text, verbose=verbose, of_supervisor=not models)
        show(lambda: _read(client, models), text, as_json=as_json, again=watch)


def status_text(answer: dict[str, Any], width: int | None, *, verbose: bool, of_supervisor: bool) -> str:
    """Return the reply to the verb "status" as text.

    width  columns of the terminal, to which values are wrapped; None: they are not
    """
    parts = []
    if of_supervisor:
        supervisor = answer["supervisor"]
        entries = tables.lines(supervisor) if verbose else supervisor_entries(supervisor)
        parts.append(_part("supervisor", entries, width))
        parts += [f"{root.title('gpu ' + str(gpu['index']))}\n  {_gpu(gpu)}" for gpu in answer.get("gpus", [])]
        if why := answer.get("gpus_unknown"):
            parts.append(f"{root.title('gpus')}\n{wrapped(f'  cannot be read: {why}', width, 2)}")
    for each in answer["models"]:
        entry = {key: value for key, value in each.items() if key != "name"}
        parts.append(_part(each["name"], tables.lines(entry) if verbose else of_model(entry), width))
    return "\n".join(parts)


def warn_of_troubles(answer: dict[str, Any]) -> None:
    """Warn on stderr of what is wrong with the supervisor as a whole, by this answer to ``status``."""
    supervisor = answer["supervisor"]
    for name, words in supervisor["troubles"].items():
        click.echo(f"modelctl: {_BEGINS.get(name, '')}{words}", err=True)


_BEGINS = {"log": "the log ", "gpus": "the GPUs cannot be read: ", "gateway": "the gateway does not answer: ",
           "cluster": "cluster: ", "folders": "folders: "}  # fmt: skip
"""The beginning of the line about a trouble."""


def _ps_row(m: dict[str, Any], reason: str, *, in_words: bool) -> tuple[object, ...]:
    """Return the cells of a model, in the order of PS.

    reason    the cell REASON
    in_words  say how far a load is; programs read the bare state
    """
    percentage = percentage_of(m.get("progress")) if in_words else None
    state = m["state"] if percentage is None else f"{m['state']} {percentage} %"
    return (
        m["name"], state, m.get("node"), _where(m), _vram(m), m["context"], m["active"], m["queued"], m["tokens_per_s"],
        _age(m["idle_s"]), _until(m), m["pid"], _age(m["state_s"]), m["restarts"],
        tables.cache_in_use(m.get("engine_stats") or {}), tables.other_names(m), m.get("folder"), reason,
    )  # fmt: skip


def _where(m: dict[str, Any]) -> str:
    """Return the configured GPU, and for ``auto`` also where the model was placed."""
    placed = m.get("placed")
    return f"auto:{','.join(map(str, placed))}" if m["gpu"] == "auto" and placed else str(m["gpu"])


def _vram(m: dict[str, Any]) -> str | None:
    """Return the memory that the model holds, and in brackets the estimate."""
    held, estimated = m.get("vram_bytes"), m.get("vram_estimate_bytes")
    text = "-" if held is None else size(held)
    return f"{text} ({size(estimated)})" if estimated else None if held is None else text


def _until(m: dict[str, Any]) -> str | None:
    """Return the cell UNTIL: the event that ends the model's present state, or the time until the model is unloaded."""
    if m["state"] in ("unloaded", "asleep"):
        return "request"
    if m["state"] in ("stopped", "failed"):
        return "start"
    return None if m.get("until_s") is None else _age(m["until_s"])


def _gpu(gpu: dict[str, Any]) -> str:
    used, total, free = (size(gpu[key]) for key in ("used_bytes", "total_bytes", "free_bytes"))
    memory = f"{used} of {total} in use, {free} free  {gpu['uuid']}"
    return f"{memory}\n  {sensors}" if (sensors := tables.sensors(gpu)) else memory


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _part(title: str, entries: list[tuple[str, list[str]]], width: int | None) -> str:
    """Return a heading, and under it labels with their values. What follows the first line of a value is under it."""
    longest = max((len(label) for label, _ in entries), default=0)
    lines = [root.title(title)]
    for label, texts in entries:
        for number, text in enumerate(texts):
            value = clean(completed(text))
            line = wrapped(f"  {label if number == 0 else '':<{longest}}  {value}", width, longest + 4)
            if label == "state" and number == 0:
                word = value.partition(" ")[0]
                line = line.replace(word, root.painted(word), 1) if line.count(word) == 1 else line
            lines.append(line)
    return "\n".join(lines)


# The command cluster: show the machines of the Ray cluster, and what runs there.


NO_CLUSTER: Final = (
    "there is no cluster: models.yaml has no section cluster, and all workers run on the supervisor's machine"
)
COLUMNS: Final = (
    Column("NODE"), Column("STATE", drop=1), Column("ADDRESS", drop=4), Column("GPUS", True, drop=2),
    Column("LEASED", True, drop=3), Column("VERSION", drop=6), Column("HEARD", drop=5, right=True),
    Column("WORKERS", drop=7, least=20),
)  # fmt: skip
LATE_S: Final = 10.0
"""Seconds without an answer of Ray after which the text says so."""


@command(
    ("modelctl cluster --watch", "Show the machines, and look again each second"),
)
@watch
@json_options
def cluster(watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show the Ray cluster: its machines, their GPUs, and the workers on them.

    LEASED are GPUs that Ray has lent to anybody. HEARD is the time since a worker's agent was last heard. VERSION is
    known once a worker was started there. --json prints null without a section `cluster` in models.yaml.
    """
    with connect(runtime_dir, admin=True) as client:
        show(lambda: described(client.status()), cluster_text, as_json=as_json, again=watch)


def described(status: Values) -> dict[str, Any] | None:
    """Return the cluster in a reply to the verb "status", each machine with its workers; None without a cluster.

    Workers that wait for a machine are under ``waiting``, with the reason.
    """
    found = status["supervisor"]["cluster"]
    if found is None:
        return None

    def workers_on(node: str | None) -> list[dict[str, Any]]:
        own = (worker for worker in status["models"] if worker["node"] == node)
        return [{key: worker[key] for key in ("name", "model", "state")} for worker in own]

    nodes = found["nodes"]
    return {
        **found,
        "nodes": [
            {**node, "workers": workers_on(node["name"]) + (workers_on(None) if node["own"] else [])} for node in nodes
        ],
        "waiting": [
            {key: worker[key] for key in ("name", "node", "reason")}
            for worker in status["models"]
            if worker["state"] == "starting" and worker["reason"]
        ],
    }


def cluster_text(found: Values | None, width: int | None) -> str:
    """Return the cluster as text: how the supervisor reaches it, a table of its machines, and what is wrong.

    found  the result of ``described``
    width  columns of the terminal; None: whole tables, and each text in one line
    """
    if found is None:
        return wrapped(NO_CLUSTER, width, 2)
    head = [f"Ray cluster {found['ray']}; workers on other machines connect to {found['advertise']}"]
    if found["model_store"]:
        head.append(f"the model store sends directories at {found['model_store']}")
    if found["trouble"]:
        head.append(f"cannot be used: {found['trouble']}")
    elif found["answered_s"] is None:
        head.append("it has not answered yet")
    elif found["answered_s"] > LATE_S:
        head.append(f"Ray has not answered for {duration(found['answered_s'])}: what follows is that old")
    rows = [_row(node) for node in found["nodes"]]
    rows += [_gone(node) for node in found["gone"]]
    tail = [f"{each['name']} waits: {each['reason']}" for each in found["waiting"]]
    parts = [_lines(head, width), table(COLUMNS, rows, width) if rows else "", _lines(tail, width)]
    return "\n\n".join(filter(None, parts))


def _lines(texts: Sequence[str], width: int | None) -> str:
    return "\n".join(wrapped(clean(completed(text)), width, 2) for text in texts)


def _row(node: Values) -> tuple[object, ...]:
    """Return the cells of a machine, in the order of COLUMNS."""
    name = f"{node['name']} (here)" if node["own"] else node["name"]
    heard = None if node["heard_s"] is None else duration(node["heard_s"])
    leased = f"{node['gpus'] - node['free']:g}"
    return (
        name, "there", node["address"], f"{node['gpus']:g}", leased, node["version"], heard, _workers(node["workers"])
    )  # fmt: skip


def _gone(node: Values) -> tuple[object, ...]:
    """Return the cells of a machine that is gone, in the order of COLUMNS."""
    since = f"gone for {duration(node['gone_s'])}"
    return node["name"], since, node["address"], f"{node['gpus']:g}", None, None, None, None


def _workers(workers: Sequence[Values]) -> str | None:
    """Return the workers by model and state: ``llama-8b: 2 ready, 1 loading; qwen: 1 ready``; None without any."""
    states: dict[str, Counter[str]] = {}
    for worker in workers:
        states.setdefault(worker["model"], Counter())[worker["state"]] += 1
    counted = {model: ", ".join(f"{n} {state}" for state, n in counts.items()) for model, counts in states.items()}
    return "; ".join(f"{model}: {text}" for model, text in counted.items()) or None
