"""``modelctl config`` shows each value, and where it comes from. ``serve --watch`` follows the file."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import modelctl
from tests.conftest import Serve
from tests.serving import ROOT, engine, wait_until

FILE = """\
models:
  a:
    model_dir: demo:letters
    engine: transformers
    gpu: cpu
supervisor:
  stall: 30s
"""


def test_each_value_has_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    done = modelctl("config", "-c", file, MODELCTL_MODELS__A__MAX_BATCH_SIZE="4", MODELCTL_SUPERVISOR__STALL="2m")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["models.a.gpu"] == ["cpu", "models.yaml:5"]
    assert rows["models.a.max_batch_size"] == ["4", "MODELCTL_MODELS__A__MAX_BATCH_SIZE"]
    assert rows["supervisor.stall"] == ["2m", "MODELCTL_SUPERVISOR__STALL"]
    assert rows["--config"] == [str(file), "--config"]
    assert "models.a.replicas" not in rows


def test_defaults_and_json_for_one_model(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    done = modelctl("config", "a", "--all", "--json", MODELCTL_CONFIG=str(file))
    found = {setting["key"]: setting for setting in json.loads(done.stdout)["settings"]}
    assert found["models.a.replicas"] == {
        "key": "models.a.replicas", "value": 1, "origin": "default", "source": None, "line": 0,
    }  # fmt: skip
    assert found["models.a.gpu"]["line"] == 5
    assert not any(key.startswith("supervisor") for key in found)
    done = modelctl("config", "nobody", MODELCTL_CONFIG=str(file))
    assert (done.returncode, "there is a" in done.stderr) == (2, True)


def test_values_are_yaml_and_the_file_may_be_an_argument(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    given = {
        "aliases": ["gpt-4o", "8"], "variants": {"short": {"sampling": {"max_tokens": 3}}}, "model_dir": "demo:letters",
        "engine": "transformers", "lazy": True, "options": None,
    }  # fmt: skip
    groups = {"g": {"models": ["a", "b"], "loaded": 1}}
    file.write_text(yaml.safe_dump({"models": {"a": given, "b": given | {"aliases": []}}, "groups": groups}))
    for arguments, cwd in ((("./models.yaml", "a"), tmp_path), ((file, "a"), ROOT), (("models.yaml", "a"), tmp_path)):
        done = modelctl("config", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stderr
        rows = [re.fullmatch(r"models\.a\.(\w+) +(.+?) +models\.yaml:\d+", line) for line in done.stdout.splitlines()]
        shown = {row[1]: yaml.safe_load(row[2]) for row in rows if row is not None}
        assert shown == given, done.stdout
    assert re.search(r"groups\.g\.models +\[a, b\] ", modelctl("config", file).stdout)
    twice = modelctl("config", file, "-c", file)
    assert (twice.returncode, "the models.yaml is given twice" in twice.stderr) == (2, True)
    assert "has no model 'aa'; did you mean 'a'?" in modelctl("config", file, "aa").stderr


def test_what_is_wrong_is_shown_beside_what_is_set(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(FILE.replace("30s", "soon"))
    done = modelctl("config", "-c", file, MODELCTL_SUPERVISR__STALL="1s")
    assert done.returncode == 78
    assert "models.a.gpu" in done.stdout
    assert "models.yaml:7: supervisor.stall: is 'soon'" in done.stderr
    assert "MODELCTL_SUPERVISR__STALL: sets no key of models.yaml: did you mean MODELCTL_SUPERVISOR__…?" in done.stderr


DEFAULTS = """\
defaults:
  engine: transformers
  lazy: true
  sampling: {temperature: 0.7, max_tokens: 100}
models:
  b:
    model_dir: demo:letters
    ttl: 5m
    sampling:
      max_tokens: 50
"""


def test_what_the_defaults_give_a_model_has_their_line(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(DEFAULTS)
    done = modelctl("config", "-c", file, "b", "--json")
    assert done.returncode == 0, done.stderr
    found = {row["key"]: (row["value"], row["line"]) for row in json.loads(done.stdout)["settings"]}
    assert found["models.b.ttl"] == ("5m", 8)
    assert found["models.b.lazy"] == (True, 3)
    assert found["models.b.sampling.temperature"] == (0.7, 4)
    assert found["models.b.sampling.max_tokens"] == (50, 10)


CHANGES_AT_ITS_START = """\
import runpy, yaml
from pathlib import Path
from supervisor import runtime

class Claimed(runtime.RuntimeDir):
    def __init__(self, path):
        file = Path("models.yaml")
        content = yaml.safe_load(file.read_text())
        content["models"]["b"] = content["models"]["a"]
        file.write_text(yaml.safe_dump(content))
        super().__init__(path)

if __name__ == "__main__":  # the supervisor reads models.yaml before it claims its runtime directory
    runtime.RuntimeDir = Claimed
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
"""


def test_a_watched_file_that_changes_while_the_supervisor_starts_is_read_again(serve: Serve, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHANGES_AT_ITS_START)
    serving = serve({"a": engine(lazy=True)}, options=["--watch"], script=script)
    wait_until(lambda: len(serving.overview()["models"]) == 2, what="the second model")


@pytest.mark.long
def test_a_watched_file_is_followed_and_a_faulty_one_changes_nothing(serve: Serve) -> None:
    def names() -> list[str]:
        return [model["name"] for model in serving.overview()["models"]]

    serving = serve({"a": engine()}, options=["--watch"])
    serving.write_models({"a": engine(), "b": engine()})
    wait_until(lambda: "b" in names(), 30, "the second model")
    text = serving.config.read_text()
    serving.config.write_text(text.replace("max_batch_size", "max_batchsize") + "nonsense: 1\n")
    wait_until(
        lambda: "models.yaml has changed: nothing is changed:" in serving.log(), 30, "the word that it is faulty"
    )
    serving.wait_state("b", "ready")
    serving.write_models({"a": engine(), "c": engine()})
    wait_until(lambda: names() == ["a", "c"], 30, "the other model")
