"""What commands show fits terminals of 60 to 250 columns, and a pipe gets all of it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml
from click import unstyle

from modelctl.cli import doctor, keys, plan, requests, views
from modelctl.cli import requests as usage
from modelctl.cli.findings import bad
from modelctl.cli.logs import line_of
from modelctl.cli.tables import columns_of, name_lines
from modelctl.cli.top import Readings, TopView, drawn
from supervisor.config.file import examine_config
from supervisor.placement.estimates import fit
from tools import demo_models

WIDTHS = (60, 80, 120, 200, 250)
NAMES = ("llama-3.1-70b-instruct-exl2-4.0bpw", "llama-3.1-70b-instruct-exl2-5.0bpw", "qwen")
LONGEST = ("a" * 40 + "-of-24-characters-in-all", "a" * 40 + "-of-24-characters-in-alt")
"""Names as long as names may be. They differ in their last character."""
WHY = (
    "cannot load: /home/ann/模型/Llama-3.1-70B/model-00001-of-00002.safetensors is cut off: 4000000 of 6365728 bytes "
    "are there; download it again"
)


def model(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name, "model": name.partition(":")[0], "state": "ready", "gpu": "auto", "placed": [0, 1], "active": 12,
        "queued": 130, "tokens_per_s": 1204.4, "engine_stats": {"pages_used": 800, "pages_total": 3200}, "pid": 4194303,
        "progress": None, "vram_bytes": 39 << 30, "vram_estimate_bytes": 40 << 30, "restarts": 2, "context": 131072,
        "idle_s": 3.0, "until_s": 300.0, "state_s": 86400.0, "reason": None, "aliases": ["the-large-one"],
        "variants": ["calm"], "default": None, "engine": "exllamav2", "device": "NVIDIA RTX A6000", "chat": True,
        "attention": "flash-attn 2.7", "decoding": "CUDA graphs", "max_batch_size": 32, "load_seconds": 9.1,
        "totals": {"tokens": 10**9, "finished": 10**6, "errors": 2, "resumed": 1}, "last_exit": None,
        "log": f"/home/ann/.local/state/modelctl/logs/{name}.log", "vram_return": None, "lazy": False, "beat_s": 0.1,
    } | fields  # fmt: skip


def models(names: tuple[str, ...]) -> list[dict[str, Any]]:
    first, *others = names
    return [model(first, state="failed", reason=WHY, pid=None), *map(model, others)]


def request(name: str, number: int) -> dict[str, Any]:
    return {
        "id": f"{name[:0]}1234-{number}", "model": name, "worker": f"{name}:2", "key": "the-laptop-of-ann",
        "state": "running", "queue_position": None, "prompt_tokens": None, "prompt_tokens_estimate": 131072,
        "tokens": 4096, "priority": "interactive", "age_ms": 10_000_000,
    }  # fmt: skip


def ps(names: tuple[str, ...], width: int | None) -> str:
    return views.ps_text(models(names), width)


def status(names: tuple[str, ...], width: int | None) -> str:
    return views.status_text({"models": models(names)}, width, verbose=False, of_supervisor=False)


def listed(names: tuple[str, ...], width: int | None) -> str:
    reply = {"requests": [request(name, number) for number, name in enumerate(names)], "total": 700}
    return requests.requests_text(reply, width)


def used(names: tuple[str, ...], width: int | None) -> str:
    counts = {"requests": 10**7, "prompt_tokens": 10**9, "cached_tokens": 10**9, "completion_tokens": 10**9}
    rows = [{"day": "2026-01-31", "key": "laptop", "model": name, **counts} for name in names]
    return usage.usage_text({"rows": rows, "more": False, "total": counts}, width)


def keys_of(names: tuple[str, ...], width: int | None) -> str:
    entry = {
        "rights": ["infer", "status", "admin"], "models": ["llama-*", "qwen"], "max_in_flight": 100,
        "tokens_per_minute": 1_000_000, "keep_alive_s": 3600, "created": "2026-01-31T12:00:00Z",
        "expires": "2027-01-31T12:00:00Z", "public_key": "k" * 40,
    }  # fmt: skip
    return keys.keys_text([{"name": name, **entry} for name in names], width)


def findings(names: tuple[str, ...], width: int | None) -> str:
    return "\n".join(doctor.finding_text(bad(name, WHY, "download the file again"), width) for name in names)


def events_of(names: tuple[str, ...], width: int | None) -> str:
    events = [{"time": 1.8e9, "level": "warning", "message": f"{name}: {WHY}"} for name in names]
    return "\n".join(line_of(event, width) for event in events)


def top(names: tuple[str, ...], width: int | None) -> str:
    readings = Readings()
    told = {"supervisor": {"version": "0.1.0", "uptime_s": 1e6}, "models": models(names), "gpus": []}
    made = [request(name, number) for number, name in enumerate(names)]
    readings.update(told, {"requests": made, "total": 3}, 1.0)
    return "\n".join(drawn(readings, TopView(), width or 400, 30, colours=False))


TABLES: Mapping[str, Callable[[tuple[str, ...], int | None], str]] = {
    "ps": ps, "requests": listed, "usage": used, "keys": keys_of, "top": top,
}  # fmt: skip
TEXTS: Mapping[str, Callable[[tuple[str, ...], int | None], str]] = {
    "status": status, "doctor": findings, "events": events_of,
}  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_and_keeps_its_key_columns(name: str, width: int) -> None:
    for names in (NAMES, LONGEST):
        shown = unstyle(TABLES[name](names, width))
        for line in shown.splitlines():
            assert columns_of(line) <= width or " " not in line.strip(), "one word, in the reason below the table"
    rows = unstyle(TABLES[name](NAMES, width))
    if (name, width) != ("usage", 60):  # a day, a key and a model of 34 characters leave no room for a number
        assert all(each in rows for each in NAMES), rows
    if width >= 120 and name != "usage":
        assert all(each in unstyle(TABLES[name](LONGEST, width)) for each in LONGEST)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_wrapped_and_says_all(name: str, width: int) -> None:
    shown = unstyle(TEXTS[name](NAMES, width))
    longest = max(columns_of(word) for word in shown.split())
    for line in shown.splitlines():
        assert columns_of(line) <= width or columns_of(line.split()[-1]) > width - 20, line
    assert longest > 60, "a path is not broken"
    assert "".join(WHY.split()) in "".join(shown.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reason_of_a_failure_is_in_ps(width: int) -> None:
    assert "".join(WHY.split()) in "".join(unstyle(ps(NAMES, width)).split())


@pytest.mark.parametrize("name", [name for name in TABLES if name != "top"])
def test_a_pipe_gets_every_column(name: str) -> None:
    widest = unstyle(TABLES[name](NAMES, None))
    for width in (60, 250):
        heading = unstyle(TABLES[name](NAMES, width)).splitlines()[0].split()
        assert set(heading) <= set(widest.splitlines()[0].split())
    assert "…" not in widest


def test_a_wide_terminal_shows_more() -> None:
    counts = [len(unstyle(ps(NAMES, width)).splitlines()[0].split()) for width in WIDTHS]
    assert counts == sorted(counts)
    assert counts[0] >= 3
    assert unstyle(ps(NAMES[2:], 250)).splitlines()[0].split()[-1] == "REASON"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"placed": None, "node": "big-box"}, "exllamav2 on machine big-box, GPU auto (NVIDIA RTX A6000)"),
        (
            {"gpu": "cpu", "device": "cpu (4 threads)", "node": "big-box"},
            "exllamav2 on machine big-box, cpu (4 threads)",
        ),
        ({"node": None}, "exllamav2 on GPU 0, 1 (NVIDIA RTX A6000)"),
    ],
)
def test_the_status_says_the_machine(fields: dict[str, Any], says: str) -> None:
    shown = views.status_text({"models": [model("a", **fields)]}, None, verbose=False, of_supervisor=False)
    assert says in shown
    waiting = model("a", **(fields | {"pid": 0, "state": "starting", "reason": "no machine"}))
    assert "pid" not in views.status_text({"models": [waiting]}, None, verbose=False, of_supervisor=False)


def test_a_model_is_shown_with_its_other_names() -> None:
    named = model("m", aliases=["gpt-4o-mini", "claude"], variants=["long"], default="m:long", description="for code")
    plain = model("n", aliases=[], variants=[])
    shown = unstyle(views.status_text({"models": [named, plain]}, None, verbose=False, of_supervisor=False))
    assert re.findall("(?:also called|description) .*", shown) == [
        "description  for code",
        "also called  gpt-4o-mini, claude, :long, (default: m:long)",
    ]
    assert "gpt-4o-mini, claude, :long, (default: m:long)" in views.ps_text([named], None)
    assert name_lines({"m": named, "n": plain}) == ["m is also called: gpt-4o-mini, claude, :long, (default: m:long)"]


def test_the_status_of_a_healthy_model_fits_a_screen() -> None:
    shown = views.status_text({"models": [model("a")]}, 80, verbose=False, of_supervisor=False)
    assert len(shown.splitlines()) <= 20, shown


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], str]:
    """Return a function of the width that returns the plan of models that do not all find room."""
    directory = str(demo_models.directory("letters"))
    known = {"model_dir": directory, "engine": "exllamav2", "gpu": 0}
    entries = {NAMES[0]: known | {"draft_model": directory}, NAMES[1]: known, NAMES[2]: known | {"vram": "40GiB"}}
    file = tmp_path_factory.mktemp("plan") / "models.yaml"
    file.write_text(yaml.safe_dump({"models": entries}))
    box = plan._made_up([24 << 30])
    outcomes = fit(plan._candidates(examine_config(file), installed=False), box, {}, None)
    return lambda width: unstyle(plan.plan_text(outcomes, box, {}, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_fits_and_says_why_a_model_does_not(width: int, planned: Callable[[int | None], str]) -> None:
    shown = planned(width)
    assert max(map(columns_of, shown.splitlines())) <= width
    heading = next(line for line in shown.splitlines() if "MODEL" in line).split()
    assert (heading[0], heading[-1]) == ("MODEL", "SUM")
    assert " ".join(planned(None).splitlines()[-2].split()) in " ".join(shown.split())
    assert "would not start: needs 40.0 GiB" in " ".join(shown.split())
    assert all(name in shown for name in NAMES)
