"""Without the engines' packages, a supervisor names the missing ones, spawns no such worker, and serves the rest."""

import sys
from pathlib import Path

import pytest

from protocol.errors import ErrorCode, WireError
from tests.deterministic_engine import answer
from tests.hidden_packages import ENGINES, Hidden
from tests.serving import Serving, engine

LETTERS = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"}
INSTALL = f"run {sys.executable} -m pip install 'modelctl[embedded]'"
SAYS = (
    "cannot load: engine transformers needs the packages transformers, torch, tokenizers, safetensors, "
    f"llguidance, numpy: {INSTALL}"
)


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hidden:
    """Hide the engines' packages from all supervisors of this test, until they are installed."""
    found = Hidden(tmp_path, *ENGINES)
    monkeypatch.setenv("PYTHONPATH", found.python_path)
    return found


@pytest.mark.long
def test_a_model_whose_packages_are_missing_fails_alone_and_starts_when_they_are_there(hidden: Hidden) -> None:
    with Serving({"letters": LETTERS, "plain": engine()}, wait=False) as serving:
        serving.wait_state("plain", "ready")
        failed = serving.wait_state("letters", "failed")
        assert failed["reason"] == failed["last_exit"]["message"] == SAYS
        assert (failed["last_exit"]["reason"], failed["restarts"], failed["generation"]) == ("config", 0, 1)
        assert "spawned" not in "".join(line for line in serving.log().splitlines() if "letters" in line)
        with serving.client() as client:
            with pytest.raises(WireError) as caught:
                client.complete("letters", "x")
            assert caught.value.code is ErrorCode.MODEL_FAILED
            assert INSTALL in caught.value.message
            assert client.complete("plain", "x", max_tokens=5, temperature=0).text == answer("x", 5)
        started = serving.modelctl("start", "letters")
        assert started.returncode == 1
        assert INSTALL in started.stderr
        hidden.install()
        serving.order("start", model="letters")
        serving.wait_state("letters", "ready", within=120)  # the worker imports torch


def test_a_lazy_model_whose_packages_are_missing_refuses_its_request(hidden: Hidden) -> None:
    with Serving({"letters": {**LETTERS, "lazy": True}}) as serving:
        with serving.client() as client, pytest.raises(WireError) as caught:
            client.complete("letters", "x")
        assert caught.value.code is ErrorCode.MODEL_FAILED
        assert INSTALL in caught.value.message
        assert serving.status("letters")["state"] == "failed"


def test_a_model_on_a_gpu_is_refused_before_its_directory_is_read(hidden: Hidden) -> None:
    models = {name: {"model_dir": "demo:letters", "gpu": 0, "autostart": False} for name in "ab"}
    with Serving({**models, "plain": engine()}) as serving:
        for name in models:
            serving.order("start", model=name)
        for name in models:
            reported = serving.wait_state(name, "failed")["reason"]
            assert reported.startswith("cannot load: engine exllamav2 needs the packages exllamav2, torch, ")
            assert reported.endswith("-m pip install 'modelctl[exllamav2]'")
        serving.order("stop", model="a")
        assert serving.status("plain")["state"] == "ready"
