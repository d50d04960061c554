"""The values of `status` as text with units, for people. Pure. Programs read ``--json``, which has the values
unchanged."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from protocol.process.worker_spec import PAGE_TOKENS
from supervisor.spelling import duration, size

Values = Mapping[str, Any]


def seconds(value: float) -> str:
    """Return a time as text, with three digits below 10 s: ``0.021 s``, ``9.25 s``, ``45 s``."""
    return f"{value:.3g} s" if value < 10 else duration(value)


def progress(values: Values) -> str:
    """Return the progress of a load as text: ``loading: 25 %``, or with an amount and a rate:
    ``copying model: 57.4 %, 3.1 GiB of 5.4 GiB, 112 MiB/s``."""
    done, total = values.get("done", 0), values.get("total", 0)
    text = f"{values.get('phase')}: {percent(min(1.0, done / total)) if total else done}"
    if total and values.get("unit") == "bytes":
        text += f", {size(done)} of {size(total)}"
    return f"{text}, {size(values['per_s'])}/s" if values.get("per_s") else text


def percent(share: float) -> str:
    """Return a share from 0 to 1 as text: ``12.5 %``."""
    return f"{share * 100:.3g} %"


def cache_in_use(stats: Values) -> str | None:
    """Return the share of the cache that is in use, of an engine's own figures; None if it is not known."""
    kind = "pages" if "pages_total" in stats else "slots"
    total = stats.get(f"{kind}_total")
    return f"{100 * stats[f'{kind}_used'] / total:.0f} %" if total else None


def sensors(gpu: Values) -> str:
    """Return what a GPU's sensors say, without those that the driver does not offer; "" if it offers none."""
    utilization, temperature = gpu.get("utilization_percent"), gpu.get("temperature_celsius")
    parts = [f"{utilization} % busy"] if utilization is not None else []
    parts += [f"{temperature} °C"] if temperature is not None else []
    if (power := gpu.get("power_watts")) is not None:
        limit = gpu.get("power_limit_watts")
        parts.append(f"{power:.0f} W" if limit is None else f"{power:.0f} of {limit:.0f} W")
    return ", ".join(parts)


def counted(count: float, what: str) -> str:
    """Return a count with its noun: ``1 request``, ``2 requests``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def other_names(m: Values) -> str | None:
    """Return the aliases of a model, its variants with a colon, and whether it is the default model; None if it has
    none of these."""
    names = [*m.get("aliases", ()), *(f":{variant}" for variant in m.get("variants", ()))]
    return ", ".join([*names, *([f"(default: {m['default']})"] if m.get("default") else [])]) or None


def name_lines(models: Mapping[str, Values]) -> list[str]:
    """Return a line for each model that has other names. ``models`` has them by the model's name, as in `status`."""
    named = {name: other_names(values) for name, values in models.items()}
    return [f"{name} is also called: {others}" for name, others in named.items() if others]


def lines(values: Values) -> list[tuple[str, list[str]]]:
    """Return the entries of a part of `status` in order: a label and one or more lines of text; ``-`` for an unknown
    value.

    The label is the name in ``--json`` without its unit. The unit is written with the value.
    """
    return [_entry(key, value) for key, value in values.items()]


def engine_lines(stats: Values) -> list[str]:
    """Return the lines about an engine's own figures. Figures that are unknown here come last, under their own
    names."""
    rest = dict(stats)
    lines = []
    for needed, optional, render in _ENGINE:
        if all(_is_number(stats.get(key)) for key in needed):
            lines.append(render(stats))
            for key in (*needed, *optional):
                rest.pop(key, None)
    return lines + [f"{key} {value}" for key, value in rest.items()]


def _entry(key: str, value: Any) -> tuple[str, list[str]]:
    if key in _NAMED:
        label, render = _NAMED[key]
        return label, [render(value) if value is not None else "-"]
    if isinstance(value, Mapping):
        render_map = _MAPS.get(key, _pairs)
        return key, (render_map(value) if value else []) or ["-"]
    if isinstance(value, bool):
        return key, ["yes" if value else "no"]
    if _is_number(value):
        for suffix, render in _SUFFIXES:
            if key.endswith(suffix):
                return key.removesuffix(suffix), [render(value)]
    for suffix, _ in _SUFFIXES:
        if value is None and key.endswith(suffix):
            return key.removesuffix(suffix), ["-"]
    return key, ["-" if value in (None, "") else str(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _pairs(values: Values) -> list[str]:
    return [f"{key} {value}" for key, value in values.items()]


def _exit(values: Values) -> list[str]:
    again = "" if values.get("retry") or values.get("reason") == "asked" else "; not tried again by itself"
    message = str(values.get("message"))
    at = values.get("time")
    when = "" if at is None else f", {datetime.fromtimestamp(at).strftime('%Y-%m-%d %H:%M:%S')}"
    return [
        f"{values.get('reason')} (exit code {values.get('code')}){when}{again}",
        message,
        *(f"  {line}" for line in values.get("lines", ()) if line.strip() != message),
    ]


def _totals(values: Values) -> list[str]:
    words = {
        "tokens": "tokens generated",
        "finished": "requests finished",
        "errors": "requests ended with an error",
        "resumed": "answers resumed after a worker's death",
        "refused": "requests refused because the queue was full",
    }
    return [f"{words.get(key, key)}: {value}" for key, value in values.items()]


def _by_gpu(values: Values) -> list[str]:
    return [f"GPU {index}: {'-' if held is None else size(held)}" for index, held in values.items()]


_RATES = (
    ("requests_left", "requests_per_minute", "requests a minute"),
    ("tokens_left", "tokens_per_minute", "tokens a minute"),
    ("tokens_left_of_day", "tokens_per_day", "tokens a day"),
)


def _tcp(values: Values) -> list[str]:
    if problem := values.get("problem"):
        return [str(problem)]
    lines = [f"{values.get('listen')}: refused {values.get('forbidden')} for want of a right, cut off "
            f"{counted(values.get('cut_off', 0), 'connection')}"]  # fmt: skip
    for key in values.get("keys", ()):
        line = f"key {key['name']} ({', '.join(key['rights'])}): {counted(key['connections'], 'connection')}"
        for left, rate, unit in _RATES:
            if key[left] is not None:
                line += f", {key[left]} of {key[rate]} {unit} left"
        lines.append(f"{line}, rate limited {counted(key['rate_limited'], 'time')}")
    return lines


def gateway_url(values: Values) -> str:
    """Return the address of the gateway, from its part of `status`."""
    return f"{'https' if values.get('tls') else 'http'}://{values.get('listen')}"


def _gateway(values: Values) -> list[str]:
    if problem := values.get("problem"):
        return [f"{gateway_url(values)} does not answer: {problem}"]
    if not values.get("ready"):
        return [f"{gateway_url(values)}: starting"]
    words = [f"{gateway_url(values)}, auth {values.get('auth')}", f"pid {' '.join(map(str, values.get('pids', ())))}"]
    return [", ".join([*words, *([counted(values["restarts"], "restart")] if values.get("restarts") else [])])]


def _usage(values: Values) -> list[str]:
    kept = f"{values.get('file')}, {counted(values.get('days', 0), 'day')} kept"
    others = values.get("crowded_out")
    return [
        kept,
        *([f"not written: {values['trouble']}"] if values.get("trouble") else []),
        *([f"{counted(others, 'request')} of further keys and models counted together"] if others else []),
    ]


_MAPS: dict[str, Callable[[Values], list[str]]] = {
    "usage": _usage,
    "gateway": _gateway,
    "tcp": _tcp,
    "engine_stats": engine_lines,
    "last_exit": _exit,
    "progress": lambda values: [progress(values)],
    "totals": _totals,
    "vram_by_gpu": _by_gpu,
}
_NAMED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "aliases": ("aliases", lambda v: ", ".join(v) or "-"),
    "unlisted": ("unlisted", lambda v: ", ".join(v) or "-"),
    "variants": ("variants", lambda v: ", ".join(v) or "-"),
    "state_s": ("since", lambda v: f"{duration(v)} ago"),
    "beat_s": ("last progress", lambda v: f"{duration(v)} ago"),
    "tokens_per_s": ("speed", lambda v: f"{v} tokens/s"),
    "load_seconds": ("loaded in", seconds),
    "context": ("context", lambda v: counted(v, "token")),
    "max_batch_size": ("max_batch_size", lambda v: counted(v, "request")),
    "active": ("active", lambda v: counted(v, "request")),
    "queued": ("queued", lambda v: counted(v, "request")),
    "placed": ("placed on", lambda v: "GPU " + ", ".join(map(str, v))),
    "vram_estimate_bytes": ("vram estimated", size),
    "vram_loaded_bytes": ("vram when loaded", size),
    "vram_estimate": ("vram estimated of", lambda v: ", ".join(f"{part} {size(held)}" for part, held in v.items())),
    "vram_returned_ms": ("vram returned after", lambda v: f"{v} ms"),
}
_SUFFIXES: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("_ms", lambda v: f"{v} ms"),
    ("_s", duration),
    ("_bytes", size),
)


def _steps(stats: Values) -> str:
    return f"steps: {stats['steps']}" + (f", {stats['step_ms']} ms each (median)" if "step_ms" in stats else "")


def _pages(stats: Values) -> str:
    used, total = stats["pages_used"], stats["pages_total"]
    cached = f", {stats['pages_cached']} kept for prompts that begin alike" if "pages_cached" in stats else ""
    share = f" ({percent(used / total)})" if total else ""
    return f"cache: {used} of {total} pages of {PAGE_TOKENS} tokens in use{share}{cached}"


def _requests(stats: Values) -> str:
    reading = f", {stats['prefilling']} of them computing the prompt" if "prefilling" in stats else ""
    return f"requests: {stats['active']} active{reading}; {stats['pending']} waiting in the engine"


# Required figures; optional figures of the same line; the function that makes the line.
_ENGINE: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Values], str]], ...] = (
    (("active", "pending"), ("prefilling",), _requests),
    (("steps",), ("step_ms",), _steps),
    (("jobs_per_step",), (), lambda s: f"batch: {s['jobs_per_step']} requests per step (mean)"),
    (("tokens_per_step",), (), lambda s: f"answers: {s['tokens_per_step']} tokens per step (mean)"),
    (("prefill_share",), (), lambda s: f"prefill: in {percent(s['prefill_share'])} of the steps"),
    (("prefill_tokens", "decode_tokens"), (),
     lambda s: f"computed: {s['prefill_tokens']} tokens of prompts, {s['decode_tokens']} of answers"),
    (("prompt_tokens", "cached_tokens"), (),
     lambda s: f"cache hits: {s['cached_tokens']} of {s['prompt_tokens']} tokens of prompts"),
    (("draft_accepted",), (), lambda s: f"speculation: {percent(s['draft_accepted'])} of the drafted tokens accepted"),
    (("slots_used", "slots_total"), (),
     lambda s: f"cache: {s['slots_used']} of {s['slots_total']} slots (one per request) in use"),
    (("pages_used", "pages_total"), ("pages_cached",), _pages),
    (("defragmented_s_ago",), (), lambda s: f"cache last put in order {duration(s['defragmented_s_ago'])} ago"),
    (("vram_used",), (), lambda s: f"VRAM: {size(s['vram_used'])} held by PyTorch"),
)  # fmt: skip
