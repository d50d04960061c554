"""ps and status."""

import json
from pathlib import Path
from typing import Any

import click

from supervisor.cli.options import as_json, connect, runtime_dir_option
from supervisor.cli.tables import table

PS_HEADER = ("NAME", "STATE", "GPU", "VRAM", "CTX", "ACTIVE", "QUEUED", "TOK/S", "IDLE", "PID")


@click.command()
@as_json
@runtime_dir_option
def ps(as_json: bool, runtime_dir: Path) -> None:
    """List the models."""
    with connect(runtime_dir) as client:
        models = client.status()["models"]
    if as_json:
        click.echo(json.dumps(models, indent=2))
    else:
        click.echo(table(PS_HEADER, [_ps_row(m) for m in models]))


@click.command()
@click.argument("model", required=False)
@as_json
@runtime_dir_option
def status(model: str | None, as_json: bool, runtime_dir: Path) -> None:
    """Show the supervisor and its models, or one MODEL, in full."""
    with connect(runtime_dir) as client:
        answer = client.status(model)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    if model is None:
        _print_map("supervisor", answer["supervisor"])
    for entry in answer["models"]:
        _print_map(entry.pop("name"), entry)


def _ps_row(m: dict[str, Any]) -> tuple[object, ...]:
    return (
        m["name"], m["state"], m["gpu"], _size(m.get("vram_bytes")), m["context"], m["active"], m["queued"],
        m["tokens_per_s"], _age(m["idle_s"]), m["pid"],
    )  # fmt: skip


def _size(size: int | None) -> str | None:
    """Bytes in the unit that people read: ``2.7 GiB``."""
    if size is None:
        return None
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _print_map(title: str, values: dict[str, Any]) -> None:
    click.echo(title)
    width = max(map(len, values), default=0)
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {_readable(k, v)}" for k, v in value.items())
        value = _readable(key, value)
        click.echo(f"  {key:<{width}}  {'-' if value in (None, '') else value}")


def _readable(key: str, value: Any) -> Any:
    """Sizes with their unit; everything else as it came."""
    sized = key in ("vram_used", "vram_bytes")
    return _size(value) if sized and isinstance(value, int) else value
