"""What variables of the environment have brought into models.yaml shows nowhere: the names of the variables do."""

import http.client
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.errors import WireError
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

PLACE, TOKEN, STOP = "canary-place-4711", "sk-canary-token-4711", "canary stop 4711"
CANARY = "4711"
DEMO = ROOT / "model_worker" / "demo_models"
IMPATIENT = Path(__file__).with_name("impatient_supervisor.py")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / PLACE
    for name in ("m", "broken", "talkative"):
        (directory / name).mkdir(parents=True)
    shutil.copytree(DEMO / "letters", directory / "many" / "good")
    shutil.copytree(DEMO / "letters", directory / "many" / "bad")
    (directory / "many" / "bad" / "config.json").write_text("{")
    (directory / "broken" / "config.json").write_text("{")
    (directory / "template.jinja").write_text("{{ messages[0].content }}{{ tail }}")
    return directory


@pytest.fixture
def serving(place: Path) -> Iterator[Serving]:
    port = free_port()
    # The names of the variables must not be in the values of others.
    variables = {
        "PLACE_OF_MODELS": str(place), "TOKEN_OF_ENGINE": TOKEN, "STOP_OF_MODEL": STOP,
        "CONTEXT_OF_MODEL": "4096", "BATCH_OF_FOLDER": "6", "LISTEN_OF_GATEWAY": f"127.0.0.1:{port}",
    }  # fmt: skip
    serving = Serving(models(), environment=variables, wait=False, begin=False, script=IMPATIENT)
    serving._sections |= {
        "request_log": "${PLACE_OF_MODELS}/requests.jsonl",
        "usage": {"file": "${PLACE_OF_MODELS}/usage.sqlite3"},
        "log_level": "debug",
    }
    folder = {"engine": "transformers", "max_batch_size": "${BATCH_OF_FOLDER}"}
    serving._beside["folders"] = [{"path": "${PLACE_OF_MODELS}/many", "defaults": folder}]
    serving._beside["gateway"] = {"listen": "${LISTEN_OF_GATEWAY}", "auth": "none"}
    serving.write_models(models())
    serving.process = serving._spawn()
    with serving:
        serving.port = port  # type: ignore[attr-defined]
        yield serving


def models(**keys: Any) -> dict[str, dict[str, Any]]:
    own: dict[str, Any] = {
        "model_dir": "${PLACE_OF_MODELS}/m", "max_seq_len": "${CONTEXT_OF_MODEL}",
        "template_kwargs": {"tail": "${TOKEN_OF_ENGINE}"}, "forced": {"stop": ["${STOP_OF_MODEL}"]},
    }  # fmt: skip
    talkative = engine() | {"engine": "tests.faulty_engines:Talkative", "model_dir": "${PLACE_OF_MODELS}/talkative"}
    talkative["options"] = {**talkative["options"], "template": "${TOKEN_OF_ENGINE}"}
    return {
        "m": {**engine(), **own, **keys},
        "broken": {
            "engine": "transformers",
            "gpu": "cpu",
            "lazy": True,
            "model_dir": "${PLACE_OF_MODELS}/broken",
            "chat_template": "${PLACE_OF_MODELS}/template.jinja",
        },
        "talkative": {**talkative, "lazy": True},
    }


def asked(port: int, path: str, body: Any = None) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return f"{response.status} {response.headers}\n{response.read().decode(errors='replace')}"


def told_by_commands(serving: Serving) -> dict[str, str]:
    commands = (
        "config", "config --all", "config --json", "config m --all", "check", "check --json", "plan", "ps", "ps --json",
        "status", "status --json", "status m --verbose", "events", "events --json", "logs m --lines 1000",
        "logs broken --lines 1000", "logs talkative --lines 1000", "logs supervisor --lines 1000",
        "logs gateway --lines 1000", "requests", "usage", "metrics", "doctor", "reload",
    )  # fmt: skip
    told = {}
    for command in commands:
        done = serving.modelctl(*command.split(), timeout=4 * WITHIN)
        told[command] = done.stdout + done.stderr
    return told


def shown_by_processes(serving: Serving) -> str:
    lines = []
    for process in serving.processes():
        try:
            lines.append(f"{process.name()} {process.cmdline()}")
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines)


def test_a_reload_knows_the_variables_of_the_supervisor_and_no_others(serving: Serving) -> None:
    serving.wait_state("m", "ready")
    shell = {"NEW_VARIABLE": "3", "CONTEXT_OF_MODEL": "canary"}
    serving.environment |= shell
    serving.write_models(models(max_batch_size="${NEW_VARIABLE:-7}", max_queue="${NEW_VARIABLE:-9}"))
    done = serving.modelctl("reload")
    assert done.returncode == 0, done.stderr
    assert serving.status("m")["max_batch_size"] == 7
    serving.write_models(models(max_batch_size="${NEW_VARIABLE}"))
    with pytest.raises(WireError, match=r"models\.m\.max_batch_size: names the variable NEW_VARIABLE, which the envi"):
        serving.order("reload")
    assert "NEW_VARIABLE" in serving.modelctl("reload").stderr
    assert serving.status("m")["max_batch_size"] == 7


@pytest.mark.long
def test_no_value_of_a_variable_shows_anywhere(serving: Serving, place: Path) -> None:
    port = serving.port  # type: ignore[attr-defined]
    serving.wait_state("m", "ready")
    told: dict[str, str] = {}
    for path in ("/v1/models", "/v1/models/m", "/v1/models/broken", "/v1/model", "/metrics", "/props", "/health"):
        told[path] = wait_until(lambda path=path: asked(port, path))
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "stop": "x"}
    told["chat"] = asked(port, "/v1/chat/completions", chat)
    assert told["chat"].startswith("200"), told["chat"]
    assert "x-modelctl-changed: stop" in told["chat"]
    for name in ("broken", "talkative"):
        serving.order("start", model=name)
        serving.wait_state(name, "failed" if name == "broken" else "backoff")
        serving.order("stop", model=name)  # requests are refused then, and do not wait
        told[f"chat {name}"] = asked(port, "/v1/chat/completions", chat | {"model": name})
        told[f"/v1/models/{name}"] = asked(port, f"/v1/models/{name}")
    good = wait_until(lambda: next((m for m in serving.overview()["models"] if m["name"] == "good"), None))
    assert good["max_batch_size"] == 6
    told["/v1/models/good"] = asked(port, "/v1/models/good")
    wait_until(lambda: "many/bad" in serving.log(), what="the directory that is not served")
    told |= told_by_commands(serving)
    for verb, params in {
        "status": {},
        "config": {"all": True},
        "settings": {"model": "m"},
        "ended_requests": {},
    }.items():
        told[f"verb {verb}"] = json.dumps(serving.order(verb, **params))
    told["processes"] = shown_by_processes(serving)
    certificate = {"certificate": "${PLACE_OF_MODELS}/none.pem", "private_key": "${PLACE_OF_MODELS}/none.key"}
    serving.write_models(models(), gateway={"listen": "${LISTEN_OF_GATEWAY}", "auth": "none", **certificate})
    told["reload"] = json.dumps(serving.order("reload"))
    told["trouble"] = json.dumps(
        wait_until(lambda: (found := serving.overview()) and found["supervisor"]["gateway"]["problem"] and found)
    )
    told["check the certificate"] = serving.modelctl("check", str(serving.config)).stderr
    place.joinpath("requests.jsonl").unlink()
    told["output"] = serving.stderr()
    for log in (serving.runtime_dir / "logs").iterdir():
        told[f"file {log.name}"] = log.read_text(errors="replace")
    for where, text in told.items():
        for line in text.splitlines():
            assert CANARY not in line, f"{where}: {line[:2000]}"
    whole = "\n".join(told.values())
    for name in ("${PLACE_OF_MODELS}/m", "${PLACE_OF_MODELS}/broken", "${TOKEN_OF_ENGINE}", "${CONTEXT_OF_MODEL}",
                 "${PLACE_OF_MODELS}/many/bad", "${PLACE_OF_MODELS}/many/good"):  # fmt: skip
        assert name in whole
    assert "${PLACE_OF_MODELS}/none.pem" in told["trouble"]
    assert "${PLACE_OF_MODELS}/requests.jsonl" in told["verb status"]
