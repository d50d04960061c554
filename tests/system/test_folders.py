"""A running supervisor serves the models that come into a folder, and lets go of those that leave."""

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.config.folder_keeper import MOST_EVENTS, MOST_SAID
from supervisor.logs.events import KEPT
from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, engine, is_helper, wait_until

DEMO = ROOT / "model_worker" / "demo_models"
IMPATIENT = Path(__file__).with_name("impatient_supervisor.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir(mode=0o755)
    return tmp_path / "models"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serving(folder: Path, port: int) -> Iterator[Serving]:
    """Serve a folder, and one model with an entry that shares no file with it."""
    with Serving(
        {"own": engine(aliases=["Taken"])},
        folders=[{"path": str(folder), "defaults": {"engine": "transformers"}}],
        gateway={"listen": port, "auth": "none"},
        stop={"drain": "60s"},
        script=IMPATIENT,
    ) as serving:
        yield serving


def names(serving: Serving) -> list[str]:
    return [model["name"] for model in serving.overview()["models"]]


def ask(port: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def settings_of(serving: Serving, model: str) -> dict[str, dict[str, Any]]:
    with serving.client(admin=True) as client:
        found = client.call("settings", model=model)["settings"]
    return {one["key"].removeprefix(f"models.{model}."): one for one in found}


def events(serving: Serving) -> list[str]:
    done = serving.modelctl("events", "--json")
    told = map(json.loads, done.stdout.splitlines())
    return [event["message"] for event in told if event["kind"] == "folder"]


def test_a_model_that_is_copied_slowly_is_served_when_it_is_complete_and_goes_with_its_directory(
    serving: Serving, folder: Path, port: int
) -> None:
    before = serving.status("own")
    target = folder / "Letters-exl2" / "4.0bpw"
    target.mkdir(parents=True)
    files = sorted((DEMO / "letters").iterdir(), key=lambda file: file.suffix == ".json")
    for file in files:  # a file each second: the directory is never quiet before the last one
        shutil.copy(file, target)
        copied = time.monotonic()
        wait_until(lambda since=copied: time.monotonic() - since > 1.0)  # type: ignore[misc]
        assert names(serving) == ["own"]
    found = wait_until(lambda: next((m for m in serving.overview()["models"] if m["name"] != "own"), None))
    assert (found["name"], found["state"], found["folder"]) == ("letters-exl2-4.0bpw", "unloaded", str(folder))
    assert time.monotonic() - copied >= 2.0
    settings = settings_of(serving, "letters-exl2-4.0bpw")
    assert settings["engine"]["value"] == "transformers"
    assert settings["engine"]["source"].startswith("models.yaml:")
    assert (settings["aliases"]["value"], settings["lazy"]["value"]) == ("[Letters-exl2/4.0bpw]", "true")
    assert settings["max_batch_size"]["source"] == "default"
    status, answer = ask(port, {"model": "Letters-exl2/4.0bpw", "prompt": "sort: d b a c ->", "max_tokens": 9})
    assert (status, answer["choices"][0]["text"].split()[:4]) == (200, ["a", "b", "c", "d"])
    long: dict[str, Any] = {"model": "letters-exl2-4.0bpw", "prompt": "count: 1 2 3 ->", "ignore_eos": True}
    answers: list[tuple[int, dict[str, Any]]] = []
    running = threading.Thread(target=lambda: answers.append(ask(port, long | {"max_tokens": 400})))
    running.start()
    wait_until(lambda: serving.status("letters-exl2-4.0bpw")["active"])
    shutil.rmtree(target.parent)
    wait_until(lambda: names(serving) == ["own"])
    running.join(WITHIN)
    ((status, answer),) = answers
    assert (status, answer["usage"]["completion_tokens"]) == (200, 400), "a running request ends first"
    assert ask(port, long)[0] == 404
    after = serving.status("own")
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])


def test_what_cannot_be_served_is_said_once_and_a_reload_keeps_the_models(serving: Serving, folder: Path) -> None:
    for name in ("letters", "stories"):
        shutil.copytree(DEMO / name, folder / name)
    shutil.copytree(DEMO / "letters", folder / "own")
    (folder / "open").mkdir()
    shutil.copytree(DEMO / "letters", folder / "open" / "weak")
    (folder / "open").chmod(0o777)
    shutil.copytree(DEMO / "letters", folder / "cut")
    weights = next((folder / "cut").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    shutil.copytree(DEMO / "letters", folder / os.fsdecode(b"no-text\xff"))
    shutil.copytree(DEMO / "letters", folder / "two\nlines")
    wait_until(lambda: names(serving) == ["own", "letters", "stories"])
    wait_until(lambda: len(events(serving)) == 5)
    said = "\n".join(events(serving))
    assert f"{folder}/own is not served: its name would be own, which is the name of a model in models.yaml: " in said
    assert f"{folder}/open/weak is not served: others can write to {folder}/open (mode 777): " in said
    assert f"{folder}/cut is not served: " in said
    assert f"{folder}/no-text\\udcff is not served: its path has characters that are no text" in said
    assert f"{folder}/two\\nlines is not served: its path has " in said
    serving.order("start", model="letters")
    loaded = serving.wait_state("letters", "ready")
    scanner = next(p for p in serving.processes() if is_helper(p, "folder scanner", "folder_scanner"))
    serving.write_models({"own": engine(aliases=["Taken"]), "more": engine(lazy=True)})
    assert serving.modelctl("reload").returncode == 0
    wait_until(lambda: not scanner.is_running())
    wait_until(lambda: any(is_helper(p, "folder scanner", "folder_scanner") for p in serving.processes()))
    shutil.copytree(DEMO / "letters", folder / "later")
    wait_until(lambda: names(serving) == ["more", "own", "later", "letters", "stories"])
    assert len(events(serving)) == 5
    assert serving.status("letters")["pid"] == loaded["pid"]
    assert "FOLDER" in serving.modelctl("ps").stdout
    assert f"found below  {folder}\n" in serving.modelctl("status", "letters").stdout
    serving.write_models({"stories": engine(lazy=True, aliases=["letters"])})
    assert serving.modelctl("reload").returncode == 0
    wait_until(lambda: names(serving) == ["stories", "later"])
    assert serving.status("stories")["folder"] is None
    serving.write_models({"own": engine()})
    assert serving.modelctl("reload").returncode == 0
    wait_until(lambda: names(serving) == ["own", "later", "letters", "stories"])
    serving.write_models({"own": engine()}, folders=None)
    assert serving.modelctl("reload").returncode == 0
    wait_until(lambda: names(serving) == ["own"])


def test_models_stay_while_the_folder_is_away(serving: Serving, folder: Path) -> None:
    shutil.copytree(DEMO / "letters", folder / "letters")
    wait_until(lambda: "letters" in names(serving))
    folder.rename(folder.with_name("elsewhere"))
    words = f"models below it stay as they are, because it cannot be read: {folder}: No such file or directory"
    wait_until(lambda: serving.overview()["supervisor"]["troubles"].get("folders") == words)
    assert "letters" in names(serving)
    scanner = next(p for p in serving.processes() if is_helper(p, "folder scanner", "folder_scanner"))
    scanner.kill()
    folder.mkdir()
    wait_until(lambda: names(serving) == ["own"], what="the end of the model")
    assert not serving.overview()["supervisor"]["troubles"]


def test_thousands_of_directories_that_are_not_served_leave_room_for_other_events(
    serving: Serving, folder: Path
) -> None:
    for number in range(MOST_SAID + 100):
        directory = folder / f"open-{number}"
        directory.mkdir()
        directory.chmod(0o777)
        for name in ("config.json", "model.safetensors"):
            (directory / name).touch()
    wait_until(lambda: f"more than {MOST_SAID} directories are not served" in serving.log())
    shutil.copytree(DEMO / "letters", folder / "letters")
    wait_until(lambda: names(serving) == ["own", "letters"])
    with serving.client() as client:
        found = client.call("events", limit=KEPT)["events"]
    assert [event["kind"] for event in found].count("folder") == MOST_EVENTS + 1
    assert serving.log().count(" is not served: ") == MOST_SAID
    assert any(event["model"] == "own" and event.get("state") == "ready" for event in found)
