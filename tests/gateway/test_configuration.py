"""Administrators read models.yaml over HTTP, with its faults and with what a reload would change."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.gateway.test_orders import Http
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until

MODELS = {"m": engine(lazy=True), "n": engine(lazy=True)}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Http]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys")
    tokens = {
        name: store.add_token(name, parse_rights(rights))
        for name, rights in {"ops": "infer,status,admin", "watcher": "infer,status"}.items()
    }
    tokens["other"] = store.add_token("other", parse_rights("admin"), models=("n",))
    port = free_port()
    with Serving(MODELS, gateway={"listen": port}, keys=store.directory) as serving:
        yield Http(serving, port, tokens)


@pytest.fixture
def file(keyed: Http) -> Iterator[Path]:
    """Give the models.yaml, and put its content back afterwards."""
    before = keyed.serving.config.read_bytes()
    yield keyed.serving.config
    keyed.serving.config.write_bytes(before)


def test_the_file_is_shown_with_the_place_of_each_value(keyed: Http, file: Path) -> None:
    status, shown = keyed.ask("GET", "/v1/config", key="ops")
    assert status == 200
    assert (shown["file"], shown["text"], shown["problems"], shown["more"]) == (str(file), file.read_text(), [], False)
    assert shown["changes"] == {"settings": [], "models": {}}
    values = {setting["key"]: setting for setting in shown["settings"]}
    line = file.read_text().splitlines().index("    lazy: true") + 1
    assert values["models.m.lazy"] == {
        "key": "models.m.lazy", "value": "true", "source": f"models.yaml:{line}", "line": line,
    }  # fmt: skip
    assert "models.m.replicas" not in values
    every = keyed.ask("GET", "/v1/config?all=true", key="ops")[1]["settings"]
    assert {"key": "models.m.replicas", "value": "1", "source": "default", "line": 0} in every


def test_what_a_reload_would_change_is_told_and_is_changed_by_it(keyed: Http, file: Path) -> None:
    before = keyed.generations()
    data = yaml.safe_load(file.read_text())
    data["models"]["m"]["max_queue"] = 7
    data["models"]["n"]["options"]["step_s"] = 0.01
    data["models"]["o"] = engine(lazy=True)
    data["default_model"] = "m"
    data["gateway"]["keepalive"] = "off"
    data["supervisor"]["stall"] = "2m"
    file.write_text(yaml.safe_dump(data))
    changes = keyed.ask("GET", "/v1/config", key="ops")[1]["changes"]
    assert changes == {
        "settings": ["stall", "gateway.keepalive", "default_model"],
        "models": {"m": "settings", "n": "workers", "o": "added"},
    }
    assert keyed.generations() == before
    del data["gateway"]["keepalive"]  # another process would take the place of the one that is asked next
    file.write_text(yaml.safe_dump(data))
    keyed.serving.order("reload")  # its steps begin in the turn of the loop after the reply
    none = {"settings": [], "models": {}}
    wait_until(
        lambda: keyed.ask("GET", "/v1/config", key="ops")[1]["changes"] == none, what="nothing is left to change"
    )


@pytest.mark.parametrize(
    ("wrong", "line", "key", "said"),
    [
        ("models:\n  m:\n    model_dir: .\n    gpus: 1\n    replicas: none\n", 5, "models.m.replicas", "none"),
        ("models: [\n", 2, "", "not YAML"),
        ("models: {}\n\xff", 2, "", "not YAML"),
    ],
)
def test_faults_have_their_lines(keyed: Http, file: Path, wrong: str, line: int, key: str, said: str) -> None:
    file.write_bytes(wrong.encode("latin-1"))
    shown = keyed.ask("GET", "/v1/config", key="ops")[1]
    assert (shown["changes"], shown["text"]) == (None, wrong.replace("\xff", "?"))
    assert any(
        (fault["line"] in (line, 0), fault["key"]) == (True, key) and said in fault["message"]
        for fault in shown["problems"]
    ), shown["problems"]


def test_keys_that_need_a_restart_are_faults_of_a_reload(keyed: Http, file: Path) -> None:
    text = file.read_text()
    line = text.splitlines().index("supervisor:") + 1
    file.write_text(text.replace("supervisor:\n", "supervisor:\n  listen: tcp://127.0.0.1:1\n"))
    faults = keyed.ask("GET", "/v1/config", key="ops")[1]["problems"]
    assert [(fault["line"], fault["key"]) for fault in faults] == [(line + 1, "supervisor.listen")]
    assert "at the next start" in faults[0]["message"]


def test_a_missing_file_is_a_fault(keyed: Http, file: Path) -> None:
    file.rename(away := file.with_suffix(".away"))
    try:
        shown = keyed.ask("GET", "/v1/config", key="ops")[1]
        assert (shown["text"], shown["settings"], shown["changes"]) == ("", [], None)
        assert "no such file" in shown["problems"][0]["message"]
        os.mkfifo(file)
        assert "regular file" in keyed.ask("GET", "/v1/config", key="ops")[1]["problems"][0]["message"]
        file.unlink()
    finally:
        away.rename(file)


def test_a_large_file_fits_into_the_reply(keyed: Http, file: Path) -> None:
    keys = "".join(f"      option-{number}: {'é' * 300}\n" for number in range(1500))
    file.write_text(f"models:\n  m:\n    model_dir: .\n    engine: a:b\n    options:\n{keys}")
    shown = keyed.ask("GET", "/v1/config", key="ops")[1]
    assert shown["text"] == file.read_text()
    assert max(len(setting["value"]) for setting in shown["settings"]) == 400
    broken = "".join(f"    wrong-{number}: {'é' * 200}\n" for number in range(2000))
    file.write_text(f"models:\n  m:\n    model_dir: .\n{broken}")
    shown = keyed.ask("GET", "/v1/config?all=true", key="ops")[1]
    assert shown["more"]


def test_only_an_administrator_of_all_models_reads_it(keyed: Http) -> None:
    for key in ("watcher", "other"):
        status, reply = keyed.ask("GET", "/v1/config", key=key)
        assert status == 403, key
        assert "text" not in reply
    assert keyed.ask("GET", "/v1/config")[0] == 401
    assert keyed.ask("GET", "/v1/config?al=true", key="ops")[1]["error"]["param"] == "al"
    assert keyed.ask("GET", "/v1/config?all=1", key="ops")[1]["error"]["param"] == "all"


def test_without_keys_nobody_reads_it() -> None:
    port = free_port()
    with Serving(MODELS, gateway={"listen": port, "auth": "none"}) as serving:
        status, reply = Http(serving, port, {}).ask("GET", "/v1/config")
        assert status == 403
        assert "gateway: {auth: keys}" in reply["error"]["message"]
