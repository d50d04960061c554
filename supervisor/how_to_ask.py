"""Tell the user of ``serve`` where the page is, and a command that asks a model over HTTP. Pure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from supervisor.workers.lifecycle import AT_REST, WorkerState

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses that mean every address of the machine, and one that programs of this machine can ask."""


def is_settled(state: WorkerState) -> bool:
    """Return whether a worker that was started is up, or will not come up by itself."""
    return state in (*AT_REST, WorkerState.READY, WorkerState.ASLEEP)


def url_here(gateway: Mapping[str, Any]) -> str:
    """Return the address of the gateway, from its part of ``status``, as programs of this machine reach it."""
    host, _, port = str(gateway.get("listen")).rpartition(":")
    return f"{'https' if gateway.get('tls') else 'http'}://{_ANY_ADDRESS.get(host, host)}:{port}"


def how_to_ask(
    gateway: Mapping[str, Any] | None, models: Sequence[tuple[str, bool | None, bool]], file: Path
) -> list[str]:
    """Return lines for the end of a start. There are none while the gateway has a problem, which is reported by itself.

    gateway  its part of ``status``; None if models.yaml has no section ``gateway``
    models   (name, whether it has a chat template or None if that is not known yet, whether it is ready)
    file     models.yaml
    """
    if gateway is None:
        line = "gateway: {listen: 127.0.0.1:8000, auth: none}"
        return [f"no HTTP port is open: for the page and OpenAI's API, add `{line}` to {file}"]
    if gateway.get("problem"):
        return []
    url = url_here(gateway)
    lines = [f"the page: {url}/", f"OpenAI's API: {url}/v1"]
    token = ""
    if gateway.get("auth") != "none":
        lines.append("a token for a client, as TOKEN below: `modelctl keys new NAME --http`")
        token = " -H 'Authorization: Bearer TOKEN'"
    if models:
        name, chat, _ = max(models, key=lambda model: (model[2], model[1] is True))  # the first of the best
        path, asked = "completions", {"prompt": "The capital of France is", "max_tokens": 32}
        if chat:
            path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
        body = json.dumps({"model": name, **asked})
        lines.append(f"try: curl {url}/v1/{path}{token} -H 'Content-Type: application/json' -d '{body}'")
    return lines
