"""Each figure of `status` has its unit and names the thing that it counts."""

from datetime import datetime

import pytest

from modelctl.cli.tables import engine_lines, lines, percent
from supervisor.config.spelling import duration, size

NOON = datetime(2026, 11, 23, 12).timestamp()
EXLLAMAV2 = {
    "pending": 2, "active": 4, "steps": 12345, "prefilling": 1, "pages_used": 30, "pages_cached": 12,
    "pages_total": 256, "vram_used": 5 << 30, "step_ms": 6.543, "jobs_per_step": 3.21, "tokens_per_step": 4.5,
    "prefill_share": 0.125, "draft_accepted": 0.634, "prompt_tokens": 4000, "cached_tokens": 1500,
    "defragmented_s_ago": 200.0,
}  # fmt: skip
TRANSFORMERS = {
    "pending": 0, "active": 1, "steps": 20, "slots_used": 1, "slots_total": 32, "prefilling": 0,
    "prefill_tokens": 100, "decode_tokens": 19, "jobs_per_step": 1.0,
}  # fmt: skip


def test_every_figure_of_the_product_engine_has_its_unit() -> None:
    assert engine_lines(EXLLAMAV2) == [
        "requests: 4 active, 1 of them computing the prompt; 2 waiting in the engine",
        "steps: 12345, 6.543 ms each (median)",
        "batch: 3.21 requests per step (mean)",
        "answers: 4.5 tokens per step (mean)",
        "prefill: in 12.5 % of the steps",
        "cache hits: 1500 of 4000 tokens of prompts",
        "speculation: 63.4 % of the drafted tokens accepted",
        "cache: 30 of 256 pages of 256 tokens in use (11.7 %), 12 kept for prompts that begin alike",
        "cache last put in order 3 min 20 s ago",
        "VRAM: 5.0 GiB held by PyTorch",
    ]


def test_the_figures_of_the_embedded_engine() -> None:
    assert engine_lines(TRANSFORMERS) == [
        "requests: 1 active, 0 of them computing the prompt; 0 waiting in the engine",
        "steps: 20",
        "batch: 1.0 requests per step (mean)",
        "computed: 100 tokens of prompts, 19 of answers",
        "cache: 1 of 32 slots (one per request) in use",
    ]


def test_figures_of_an_engine_nobody_knows_are_shown_as_they_come() -> None:
    reported = engine_lines({"steps": 3, "mood": "fine", "pages_used": "many", "pages_total": None})
    assert reported == ["steps: 3", "mood fine", "pages_used many", "pages_total None"]


def test_no_figure_is_lost() -> None:
    """Each value, perhaps rounded, is in one of the lines."""
    for stats in (EXLLAMAV2, TRANSFORMERS):
        for key in stats:
            without = {other: value for other, value in stats.items() if other != key}
            assert engine_lines(without) != engine_lines(stats), key


@pytest.mark.parametrize(
    ("key", "value", "label", "texts"),
    [
        ("state_s", 3.24, "since", ["3.2 s ago"]),
        ("load_seconds", 0.021, "loaded in", ["0.021 s"]),
        ("idle_s", None, "idle", ["-"]),
        ("uptime_s", 7500, "uptime", ["2 h 5 min"]),
        ("held_bytes", 3 << 20, "held", ["3 MiB"]),
        ("tokens_per_s", 229.0, "speed", ["229.0 tokens/s"]),
        ("context", 4096, "context", ["4096 tokens"]),
        ("context", None, "context", ["-"]),
        ("active", 1, "active", ["1 request"]),
        ("chat", True, "chat", ["yes"]),
        ("vram_bytes", 12 << 30, "vram", ["12.0 GiB"]),
        ("vram_returned_ms", 95.3, "vram returned after", ["95.3 ms"]),
        ("vram_by_gpu", {"0": 12 << 30, "1": None}, "vram_by_gpu", ["GPU 0: 12.0 GiB", "GPU 1: -"]),
        ("progress", {"phase": "loading", "done": 1, "total": 4}, "progress", ["loading: 25 %"]),
        (
            "progress",
            {"phase": "copying model", "done": 3 << 30, "total": 6 << 30, "unit": "bytes", "per_s": 7 << 20},
            "progress",
            ["copying model: 50 %, 3.0 GiB of 6.0 GiB, 7 MiB/s"],
        ),
        ("engine_stats", {}, "engine_stats", ["-"]),
        ("totals", {"tokens": 20, "errors": 1}, "totals", ["tokens generated: 20", "requests ended with an error: 1"]),
        (
            "last_exit",
            {
                "code": 70,
                "reason": "out of VRAM",
                "message": "the GPU's memory is used up",
                "retry": True,
                "time": NOON,
            },
            "last_exit",
            ["out of VRAM (exit code 70), 2026-11-23 12:00:00", "the GPU's memory is used up"],
        ),
        ("log", "/x/a.log", "log", ["/x/a.log"]),
    ],
)
def test_entries(key: str, value: object, label: str, texts: list[str]) -> None:
    assert lines({key: value}) == [(label, texts)]


def test_units() -> None:
    assert [size(n) for n in (0, 2048, 5 << 20, 3 << 29)] == ["0 bytes", "2 KiB", "5 MiB", "1.5 GiB"]
    assert [duration(s) for s in (0, 9.96, 59.7, 61, 3600, 90000)] == [
        "0.0 s", "10.0 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "1 d 1 h",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.5, 1, 0.00123)] == ["0 %", "50 %", "100 %", "0.123 %"]
