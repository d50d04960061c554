"""Log levels and formats change while everything runs: the supervisor, the gateway and the workers follow."""

import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from protocol.errors import WireError
from tests.conftest import Serve
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    gateway = {"listen": f"127.0.0.1:{free_port()}", "auth": "none"}
    with Serving({"a": engine(), "b": engine(replicas=2)}, gateway=gateway) as serving:
        yield serving


def log_of(serving: Serving, name: str) -> Path:
    return Path(serving.runtime_dir) / "logs" / f"{name}.log"


def levels(serving: Serving, *arguments: str) -> dict[str, str]:
    done = serving.modelctl("log-level", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def objects(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().split("\n")[:-1] if line.startswith("{")]


def ask_gateway(serving: Serving) -> None:
    status = serving.overview()["supervisor"]["gateway"]
    with urlopen(f"http://{status['listen']}/v1/models?secret=1") as answer:
        assert answer.status == 200


def test_a_model_follows_alone_and_goes_back(serving: Serving) -> None:
    everywhere = {"supervisor": "info", "gateway": "info", "a": "info", "b": "info"}
    assert levels(serving) == everywhere
    assert levels(serving, "a", "debug") == {"a": "debug"}
    assert levels(serving) == everywhere | {"a": "debug"}
    with serving.client() as client:
        for model in ("a", "b"):
            client.complete(model, "secret words", max_tokens=3)
        wait_until(lambda: "DEBUG   request" in log_of(serving, "a").read_text())
        assert "ended (length), 3 tokens" in log_of(serving, "a").read_text()
        assert "DEBUG" not in log_of(serving, "b:1").read_text() + serving.log()
        assert levels(serving, "a", "error") == {"a": "error"}
        size = log_of(serving, "a").stat().st_size
        client.complete("a", "p", max_tokens=3)
        serving.order("restart", model="a")
        wait_until(lambda: serving.status("a")["generation"] == 2 and serving.status("a")["state"] == "ready")
        assert log_of(serving, "a").stat().st_size == size, "the next process has the level, too"
        assert levels(serving, "info") == everywhere
    assert "secret" not in log_of(serving, "a").read_text()
    table = serving.modelctl("log-level").stdout.splitlines()
    assert [line.split() for line in table[:2]] == [["LOG", "LEVEL"], ["supervisor", "info"]]


def test_the_supervisor_and_the_gateway_follow(serving: Serving) -> None:
    wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], what="the gateway")
    ask_gateway(serving)
    levels(serving, "gateway", "debug")
    levels(serving, "supervisor", "debug")
    with serving.client() as client:
        client.complete("a", "p", max_tokens=2)
    wait_until(lambda: "model a, ended (length), 2 tokens" in serving.log())

    def told() -> bool:
        ask_gateway(serving)
        return "GET /v1/models: 200" in log_of(serving, "gateway").read_text()

    wait_until(told, what="a line of the gateway")
    assert "secret" not in log_of(serving, "gateway").read_text()
    levels(serving, "supervisor", "error")
    before = serving.order("events", limit=1)["newest"]
    serving.order("restart", model="a")
    wait_until(lambda: serving.order("events", after=before)["events"], what="events at the level error")
    serving.wait_state("a", "ready")
    levels(serving, "info")


def test_what_is_no_level_and_no_name(serving: Serving) -> None:
    for params, message in (({"level": "loud"}, "must be one of debug, info"), ({"model": "no"}, "no model 'no'")):
        with pytest.raises(WireError, match=message):
            serving.order("log_level", **params)
    assert serving.modelctl("log-level", "a", "loud").returncode == 2


def test_json_from_the_start_and_by_a_reload(serve: Serve) -> None:
    gateway = {"listen": f"127.0.0.1:{free_port()}", "auth": "none"}
    serving = serve({"a": engine()}, gateway=gateway)
    wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], what="the gateway")
    pids = serving.overview()["supervisor"]["gateway"]["pids"], serving.worker("a").pid
    serving.write_sections(log_format="json", log_level="debug")
    serving.order("reload")
    assert levels(serving) == {"supervisor": "debug", "gateway": "debug", "a": "debug"}
    assert (serving.overview()["supervisor"]["gateway"]["pids"], serving.worker("a").pid) == pids
    with serving.client() as client:
        client.complete("a", "secret words", max_tokens=3)
    lines = wait_until(lambda: [line for line in objects(log_of(serving, "a")) if line["process"] == "worker"])
    assert lines[0].items() >= {"level": "debug", "model": "a", "worker": "a"}.items()
    assert abs(datetime.now(UTC) - datetime.fromisoformat(lines[0]["time"])) < timedelta(minutes=5)
    assert lines[0]["time"].endswith("Z")

    def gateway_lines() -> list[dict[str, Any]]:
        ask_gateway(serving)
        return objects(log_of(serving, "gateway"))

    assert wait_until(gateway_lines)[0]["process"] == "gateway"
    os.kill(serving.worker("a").pid, signal.SIGKILL)
    own = wait_until(lambda: [line for line in objects(log_of(serving, "supervisor")) if line.get("kind") == "death"])
    assert own[0].items() >= {"process": "supervisor", "level": "warning", "model": "a"}.items()
    wait_until(lambda: any(line.get("kind") == "death" for line in objects(log_of(serving, "a"))))
    console = serving.stderr().splitlines()
    assert json.loads(console[-1])["process"] == "supervisor"
    serving.wait_state("a", "ready")
    assert serving.modelctl("logs", "--since", "1h", "-n", "1").stdout.startswith('{"time": ')
    assert "secret" not in log_of(serving, "a").read_text() + log_of(serving, "gateway").read_text()


def test_the_cause_of_a_death_is_found_in_json(serve: Serve) -> None:
    serving = serve({"a": engine("RaisesAtToken"), "broken": engine("CannotLoad", autostart=False)})
    serving.write_sections(log_format="json")
    serving.order("reload")
    with serving.client() as client, pytest.raises(WireError):
        client.complete("a", "bad", max_tokens=50, resume=False)
    exit_report = wait_until(lambda: serving.status("a")["last_exit"])
    assert exit_report["reason"] == "engine fault"
    assert exit_report["lines"][-1] == "ValueError: the engine broke"
    serving.order("start", model="broken")
    message = wait_until(lambda: serving.status("broken")["last_exit"])["message"]
    assert message.endswith("config.json says the moon is made of cheese")
    assert '"stream": "stderr"' in log_of(serving, "broken").read_text()
