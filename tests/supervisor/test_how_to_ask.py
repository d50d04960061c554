"""A start ends with the address of the page and a command that asks a model. Without a port it says what to add."""

import json
import re
import shlex
from pathlib import Path

import yaml

from supervisor.config.report import how_to_ask

FILE = Path("/srv/models.yaml")
OPEN = {"listen": "127.0.0.1:8000", "auth": "none", "tls": False, "problem": None, "ready": True}


def test_a_ready_model_with_a_chat_template_is_asked_first() -> None:
    models = [("base", False, True), ("lazy", None, False), ("chat", True, True), ("other", True, True)]
    page, api, line = how_to_ask(OPEN, models, FILE)
    assert (page, api) == ("the page: http://127.0.0.1:8000/", "OpenAI's API: http://127.0.0.1:8000/v1")
    assert line.startswith("try: curl http://127.0.0.1:8000/v1/chat/completions -H ")
    assert json.loads(shlex.split(line)[-1])["model"] == "chat"


def test_a_model_whose_template_is_not_known_completes_a_text() -> None:
    """Every model can, and a lazy model is not loaded to find out."""
    line = how_to_ask(OPEN, [("lazy", None, False)], FILE)[-1]
    assert "/v1/completions " in line
    assert json.loads(shlex.split(line)[-1])["prompt"]


def test_a_model_for_vectors_or_scores_is_asked_for_these() -> None:
    for makes, path, key in (("vectors", "embeddings", "input"), ("scores", "rerank", "documents")):
        line = how_to_ask(OPEN, [("a", makes, True)], FILE)[-1]
        assert f"/v1/{path} " in line
        assert json.loads(shlex.split(line)[-1])[key]
    assert "/v1/completions " in how_to_ask(OPEN, [("a", "vectors", True), ("b", False, True)], FILE)[-1]


def test_keys_tls_and_every_address() -> None:
    gateway = OPEN | {"listen": "0.0.0.0:8443", "auth": "keys", "tls": True}
    page, _, keys, line = how_to_ask(gateway, [("a", True, True)], FILE)
    assert page == "the page: https://127.0.0.1:8443/"
    assert "`modelctl keys new NAME --http`" in keys
    assert "-H 'Authorization: Bearer TOKEN'" in line


def test_without_a_port_the_section_to_add_is_named() -> None:
    (line,) = how_to_ask(None, [("a", True, True)], FILE)
    (section,) = re.findall("`(.*)`", line)
    assert yaml.safe_load(section) == {"gateway": {"listen": "127.0.0.1:8000", "auth": "none"}}
    assert str(FILE) in line
    assert how_to_ask(OPEN | {"problem": "the port is taken"}, [], FILE) == []
