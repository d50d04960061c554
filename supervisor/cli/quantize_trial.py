"""Try a model out: serve it for a moment with a supervisor of its own, and have it generate some tokens."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from protocol.client.sync_client import Client
from protocol.errors import ConnectionLost, WireError
from protocol.process.parent_death import die_with
from supervisor.cli import exit_codes
from supervisor.cli.detach import child_environment
from supervisor.cli.doctor.serving import ANSWER_S, PROMPT, TOKENS
from supervisor.cli.errors import CommandFailure
from supervisor.cli.live_lines import LiveLines
from supervisor.cli.waiting import settled_up, shown

POLL_S = 0.1


def try_out(name: str, keys: dict[str, Any], lines: LiveLines) -> dict[str, Any]:
    """Serve one model and ask it. Return {tokens, seconds} of its answer.

    keys  the keys of the model in models.yaml

    Raises CommandFailure if the model does not load or does not answer. The supervisor ends with this call, and also
    when this process is killed.
    """
    import yaml

    with tempfile.TemporaryDirectory(prefix="modelctl-") as place:
        file = Path(place, "models.yaml")
        file.write_text(yaml.safe_dump({"models": {name: keys}}), encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "supervisor",
            "serve",
            "-q",
            "-c",
            str(file),
            "--runtime-dir",
            f"{place}/r",
        ]
        with subprocess.Popen(
            [*command, "--runtime-dir", f"{place}/r"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment(),
            start_new_session=True, preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
        ) as serving:  # fmt: skip
            try:
                return _ask(name, Path(place, "r"), serving, lines)
            except (WireError, ConnectionLost, TimeoutError) as e:
                raise CommandFailure(exit_codes.FAILED, "trial", f"{name} does not answer: {e}") from None
            finally:
                lines.clear()
                serving.terminate()
                try:
                    serving.wait(ANSWER_S)
                finally:
                    serving.kill()


def _environment() -> dict[str, str]:
    """Return an environment whose variables set no keys: a gateway or other models are not part of a trial."""
    from supervisor.config_environment import DEFAULT_MODEL, PREFIX

    environment = child_environment()
    keys = [name for name in environment if name == DEFAULT_MODEL or (name.startswith(PREFIX) and "__" in name)]
    return {name: value for name, value in environment.items() if name not in keys}


def _ask(name: str, runtime_dir: Path, serving: "subprocess.Popen[bytes]", lines: LiveLines) -> dict[str, Any]:
    while True:
        if serving.poll() is not None:
            assert serving.stderr is not None
            why = serving.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise CommandFailure(exit_codes.FAILED, "trial", f"{name} cannot be served: {why}")
        try:
            with Client(runtime_dir=runtime_dir, reconnect=False) as client:
                return _answer(client, name, lines)
        except ConnectionLost:
            time.sleep(POLL_S)


def _answer(client: Client, name: str, lines: LiveLines) -> dict[str, Any]:
    while True:
        (model,) = client.status()["models"]
        if settled_up(model):
            break
        lines.show({name: shown(model)})
        time.sleep(POLL_S)
    if model["state"] != "ready":
        raise CommandFailure(exit_codes.FAILED, "trial", f"{name} does not load: {model['reason']}")
    began = time.monotonic()
    answer = client.complete(name, PROMPT, max_tokens=TOKENS, deadline_ms=int(1000 * ANSWER_S))
    return {"tokens": answer.usage["completion_tokens"], "seconds": round(time.monotonic() - began, 3)}
