"""Tables for people."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final
from unicodedata import category, east_asian_width

from modelctl.cli.root import painted, title
from supervisor.config.spelling import duration, size

# Measure, shorten and wrap text in columns of a terminal. Pure.
#
# A character of East Asian scripts takes two columns, and so do most emoji. A combining character takes none. A
# character that Unicode calls ambiguous takes one, as in most terminals outside East Asia.


ELLIPSIS: Final = "…"
"""Stands for what was cut off."""


def clean(text: str) -> str:
    """Return the text as one line that a terminal shows as it is.

    Line ends and tabs become spaces. Other characters without a shape, such as escape sequences and marks that turn the
    direction of the text, become U+FFFD: a message may hold what a model's directory or a client made up.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def columns_of(text: str) -> int:
    """Return the columns that a cleaned text takes."""
    return len(text) if text.isascii() else sum(map(_columns_of_character, text))


def _columns_of_character(character: str) -> int:
    if category(character) in ("Mn", "Me"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return the text with spaces up to a width, on its left side if ``right``."""
    spaces = " " * (width - columns_of(text))
    return f"{spaces}{text}" if right else f"{text}{spaces}"


def head(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits into a width."""
    taken = 0
    for at, character in enumerate(text):
        taken += _columns_of_character(character)
        if taken > width:
            return text[:at]
    return text


def cut(text: str, width: int) -> str:
    """Return the text, with an ellipsis in place of its end if it is wider than ``width``."""
    return text if columns_of(text) <= width else head(text, width - 1) + ELLIPSIS if width > 0 else ""


def cut_apart(texts: Sequence[str], width: int) -> list[str]:
    """Return names that are at most ``width`` columns wide, with an ellipsis inside those that were wider.

    The ellipsis is where different names stay different, if there is such a place.
    """
    different = len(set(texts))
    made: list[str] = []
    for share in (1 / 2, 1 / 4, 3 / 4, 0, 1):
        made = [_cut_inside(text, width, share) for text in texts]
        if len(set(made)) == different:
            return made
    return [_cut_inside(text, width, 1 / 2) for text in texts]


def _cut_inside(text: str, width: int, share: float) -> str:
    """Return the text with an ellipsis inside. The text after the ellipsis takes a share of the width."""
    if columns_of(text) <= width:
        return text
    after = int((width - 1) * share)
    end = head(text[::-1], after)[::-1]
    return head(text, width - 1 - columns_of(end)) + ELLIPSIS + end


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """Return the text in lines of at most ``width`` columns, all but the first indented.

    A word that is wider than a line is not broken, because people copy paths and addresses.

    width   None: leave it in one line, because programs read it
    indent  columns of the spaces, and of the label with which the text may begin: after it the line is not broken
    """
    if width is None or columns_of(text) <= width:
        return text
    lines, line = [], ""
    for number, word in enumerate(text.split(" ")):
        if number == 0:
            line = word
        elif columns_of(line) + 1 + columns_of(word) > width and columns_of(line) >= indent and line.strip():
            lines.append(line)
            line = " " * indent + word
        else:
            line = f"{line} {word}"
    return "\n".join([*lines, line])


GAP = "  "
"""The space between two columns."""
SHORTEST = 4
"""The least width of a key column."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if standard output is no terminal and so has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    right  whether the cells stand on the right; None: if all of them are numbers
    drop   where a table is too wide, the column with the greatest number is left out first; 0: a key column: it stays
    least  for texts: the width to which they are shortened before any column is left out; None: they stay whole
    state  whether the cells are painted in the colour of the state with which they begin
    rare   whether the column is left out wherever no row has a value
    """

    title: str
    right: bool | None = None
    drop: int = 0
    least: int | None = None
    state: bool = False
    rare: bool = False


def table(columns: Sequence[Column | str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Return the rows as text, each in one line. Columns are as wide as their widest cell, None is '-'.

    The heading is bold, and states are painted: ``click.echo`` takes that out again where it is not wanted.

    columns  a text stands for a column that is never left out
    width    columns of the terminal. Of a table that is wider, columns are shortened or left out (``fit``), because a
             terminal would break lines in the middle of a cell. None: all is shown, because programs read it
    """
    made = [Column(each) if isinstance(each, str) else each for each in columns]
    cells = [["-" if cell is None else clean(str(cell)) for cell in row] for row in rows]
    for i, column in enumerate(made):
        if column.right is None:
            numbers = bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows)
            made[i] = replace(column, right=numbers)
    heading, *lines = lined_up(made, cells, width)
    return "\n".join([title(heading.rstrip()), *(line.rstrip() for line in lines)])


def lined_up(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, *, paint: bool = True
) -> list[str]:
    """Return the heading and the rows of a table as lines, with spaces at their ends.

    paint  whether to paint the states
    """
    lines: list[list[str]] = [[] for _ in range(len(rows) + 1)]
    for i, room in fit(columns, rows, width).items():
        column = columns[i]
        for number, cell in enumerate(_cells_of(column, [column.title, *(row[i] for row in rows)], room)):
            shown = padded(cell, room, right=bool(column.right))
            lines[number].append(painted(cell) + shown[len(cell) :] if paint and number and column.state else shown)
    return [GAP.join(line) for line in lines]


def fit(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> dict[int, int]:
    """Return the number of each column that is shown, with its width.

    If the table is too wide, this is done in turn until it fits:

    1. Columns without a value in any row are left out, the greatest ``drop`` first.
    2. Texts are shortened to ``least``.
    3. Columns are left out, the greatest ``drop`` first.
    4. The widest key column is shortened.

    Room that is left then goes to the texts.
    """
    natural = {
        i: max([columns_of(column.title), *(columns_of(row[i]) for row in cells)])
        for i, column in enumerate(columns)
        if not column.rare or any(row[i] != "-" for row in cells)
    }
    if width is None:
        return natural
    kept = dict(natural)

    def excess() -> int:
        return sum(kept.values()) + len(GAP) * (len(kept) - 1) - width

    droppable = sorted((i for i in kept if columns[i].drop), key=lambda i: -columns[i].drop)
    texts = [i for i in kept if columns[i].least is not None]
    for i in droppable:
        if excess() > 0 and all(row[i] == "-" for row in cells):
            del kept[i]
    for i in texts:
        if i in kept and excess() > 0:
            kept[i] = max(min(kept[i], columns[i].least or 0), kept[i] - excess())
    for i in droppable:
        if i in kept and excess() > 0:
            del kept[i]
    while excess() > 0:
        widest = max(kept, key=kept.__getitem__)
        if kept[widest] <= SHORTEST:
            break
        kept[widest] -= 1
    for i in texts:
        if i in kept:
            kept[i] = min(natural[i], kept[i] - min(0, excess()))
    return kept


def _cells_of(column: Column, cells: list[str], room: int) -> list[str]:
    """Return a column's title and cells, shortened to its width. Names of key columns stay different."""
    if column.drop or column.least is not None:
        return [cut(cell, room) for cell in cells]
    return [cut(cells[0], room), *cut_apart(cells[1:], room)]


# The values of `status` as text with units, for people. Pure. Programs read ``--json``, which has the values
# unchanged.


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
    from protocol.process.worker_spec import PAGE_TOKENS  # a tenth of the time of `ps`, which shows no pages

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
