"""Model directories that could harm the worker are refused in one line that names the fault.

No code in them is run, and no file outside is read. Each directory is tried on both engines, in another process
(``hostile_directories``).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.lora import check_adapter
from model_worker.engines.exllamav2.options import Adapter
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from protocol.errors import RequestError
from tests.engines.hostile_directories import CASES, DEEP, DEMO
from tests.serving import ROOT

pytestmark = pytest.mark.long

WITHIN = 200.0
NOT_READ = {
    "exllamav2": {
        "weights named elsewhere",  # the package does not read this key
        "an adapter of a model elsewhere",  # the package does not read this file
        "code of the hub",
        "code of the hub, deeper",
        "a model much larger than its weights",  # the estimate of memory, or its own load, would refuse it
    },
    "embedded": set[str](),
}
"""Cases that an engine may load, since it does not read the hostile part."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    place = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.engines.hostile_directories", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


@pytest.mark.parametrize("engine", ["embedded", "exllamav2"])
def test_hostile_directories(reports: dict[str, dict[str, Any]], engine: str) -> None:
    wrong = []
    for case, (_, words) in CASES.items():
        outcome = reports[f"{engine}/{case}"]
        error = outcome["error"] or ""
        if outcome["seen"]:
            wrong.append(f"{case}: {outcome['seen']}")
        elif words is None or case in NOT_READ[engine]:
            if outcome["error"] is not None:
                wrong.append(f"{case}: should load: {error}")
        elif not outcome["refused"] or "\n" in error or not all(word in error for word in words):
            wrong.append(f"{case}: {outcome['kind']}: {error}")
        elif outcome["seconds"] > 20:
            wrong.append(f"{case}: took {outcome['seconds']} s")
    assert not wrong, "\n".join(wrong)


def test_a_directory_of_hugging_faces_cache_is_taken(tmp_path: Path) -> None:
    """Such a directory consists of links to the blobs of the same repository."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "f00", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(DEMO.glob("*"))):
        if file.is_file():
            (blobs / f"{number:064x}").write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert ModelDir(str(snapshot)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "?"}},
    ],
    ids=["a pattern without end", "a word that there is not"],
)
def test_a_tokenizer_that_fails_costs_the_request(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The first case raises a BaseException that is no Exception, which would end the worker."""
    shutil.copytree(DEMO, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None, **changes}))
    tokenizer = Tokenizer(ModelDir(str(tmp_path / "model")))
    secret = "a" * 2000 + " hello!"
    with pytest.raises(RequestError, match="the model's tokenizer fails on this text") as refused:
        tokenizer.encode(secret)
    assert refused.value.field == "prompt"
    assert "hello" not in str(refused.value)


def test_adapters_are_vetted_too(tmp_path: Path) -> None:
    adapter, model = Adapter(str(tmp_path / "lora"), 1.0), ModelDir(str(DEMO))

    def refused(word: str) -> None:
        with pytest.raises(LoadError, match=word) as caught:
            check_adapter(adapter, model)
        assert str(tmp_path / "lora") in str(caught.value)

    refused("no directory")
    (tmp_path / "lora").mkdir()
    config = tmp_path / "lora" / "adapter_config.json"
    config.write_text(DEEP)
    refused("nested too deeply")
    config.write_text("[]")
    refused("must hold a JSON object")
    config.unlink()
    os.mkfifo(config)
    refused("adapter_config.json is a pipe")
    config.unlink()
    config.symlink_to("/etc/passwd")
    refused("is a link to /etc/passwd")
    config.unlink()
    config.write_text('{"r": 8, "lora_alpha": 8}')
    (tmp_path / "lora" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    refused("pickled weights are never loaded")
