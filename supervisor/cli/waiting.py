"""Waiting for models to reach a state, with progress."""

import time
from collections.abc import Callable
from typing import Any

from protocol.client import Client
from supervisor.cli.tables import LiveLines, bar

POLL_S = 0.05

ModelStatus = dict[str, Any]


def wait_for(client: Client, names: list[str], done: Callable[[ModelStatus], bool]) -> list[ModelStatus]:
    """Show the models' states until all are done. Returns their last status, in the order of ``names``.

    Raises ConnectionLost if the supervisor ends meanwhile.
    """
    live = LiveLines()
    while True:
        by_name = {m["name"]: m for m in client.status()["models"]}
        models = [by_name[name] for name in names]
        live.show({m["name"]: _line(m) for m in models}, {m["name"]: f"{m['name']}: {m['state']}" for m in models})
        if all(map(done, models)):
            return models
        time.sleep(POLL_S)


def settled_up(model: ModelStatus) -> bool:
    """Ready, or will not become ready by itself."""
    return model["state"] in ("ready", "failed", "stopped")


def settled_down(model: ModelStatus) -> bool:
    return model["state"] in ("stopped", "failed")


def _line(model: ModelStatus) -> str:
    text = f"{model['name']:<16} {model['state']:<9}"
    progress = model.get("progress")
    if progress:
        return f"{text} {progress['phase']:<8} {bar(progress['done'], progress['total'])}"
    if model["state"] == "ready" and model.get("load_seconds") is not None:
        return f"{text} loaded in {model['load_seconds']:.1f} s on {model['device']}"
    if model["state"] in ("failed", "backoff") and model.get("last_exit"):
        return f"{text} {model['last_exit']['message']}"
    return text
