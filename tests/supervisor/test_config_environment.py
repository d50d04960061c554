"""Variables of the environment change the values of a models.yaml, and wrong ones are named."""

from pathlib import Path

import pytest

from supervisor.config.file import Examined, examine_config

FILE = """\
models:
  llama-3.1-8b: {model_dir: "demo:letters", engine: transformers, gpu: cpu}
  b: {model_dir: "demo:letters", engine: transformers, gpu: cpu, sampling: {temperature: 0.5}}
supervisor:
  stop: {drain: 30s, shutdown: 5s}
"""


def examined(tmp_path: Path, text: str = FILE, **variables: str) -> Examined:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return examine_config(file, {f"MODELCTL_{name}": value for name, value in variables.items()})


def problems(tmp_path: Path, **variables: str) -> list[str]:
    return [str(problem) for problem in examined(tmp_path, **variables).problems]


def test_each_section_can_be_changed(tmp_path: Path) -> None:
    found = examined(
        tmp_path,
        SUPERVISOR__STALL="2m",
        SUPERVISOR__STOP__DRAIN="1s",
        GATEWAY__LISTEN="127.0.0.1:9000",
        CLUSTER__ADVERTISE="tcp://10.1.2.3:5571",
        MODELS__LLAMA_3_1_8B__MAX_BATCH_SIZE="3",
        MODELS__B__SAMPLING__TEMPERATURE="0.25",
        MODELS__B__ALIASES="[x, y]",
        DEFAULT_MODEL="b",
    )
    assert found.problems == []
    config = found.config
    assert (config.supervisor.stall, config.supervisor.stop.drain, config.supervisor.stop.shutdown) == (120, 1, 5)
    assert config.gateway is not None
    assert config.gateway.listen == ("127.0.0.1", 9000) or "9000" in str(config.gateway.listen)
    assert config.cluster is not None
    assert config.cluster.advertise == "tcp://10.1.2.3:5571"
    assert config.models["llama-3.1-8b"].config.max_batch_size == 3
    assert config.models["b"].config.sampling == {"temperature": 0.25}
    assert config.models["b"].config.aliases == ["x", "y"]
    assert config.names.default == "b"


def test_other_variables_are_not_ours(tmp_path: Path) -> None:
    assert examined(tmp_path, KEY="x", CONFIG="y", RUNTIME_DIR="z", COMPILED="0").problems == []


def test_a_mapping_is_replaced_whole(tmp_path: Path) -> None:
    found = examined(tmp_path, SUPERVISOR__STOP="{drain: 7s}")
    assert found.config.supervisor.stop.drain == 7
    assert found.config.supervisor.stop.shutdown == 5.0, "the default, which happens to be that of the file"
    assert found.source.origin(("supervisor", "stop", "shutdown")) == ("MODELCTL_SUPERVISOR__STOP", 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SUPERVISOR__STALL", "soon", "MODELCTL_SUPERVISOR__STALL: supervisor.stall: is 'soon': must be a duration"),
        ("SUPERVISOR__STAL", "1s", "MODELCTL_SUPERVISOR__STAL: supervisor.stal: unknown key; did you mean 'stall'?"),
        ("SUPERVISER__STALL", "1s", "did you mean MODELCTL_SUPERVISOR__…?"),
        ("MODELS__LLAMA__GPU", "0", "names a model that the file does not have"),
        ("MODELS__B", "{}", "names a model and no key of it"),
        ("MODELS__B__", "{}", "sets no key of models.yaml"),
        ("SUPERVISOR__STALL", "[1", "MODELCTL_SUPERVISOR__STALL: is not YAML"),
        ("SUPERVISOR__STALL", "[&a 1, *a]", "has a YAML alias"),
        ("SUPERVISOR__STALL", "[" * 30_000, "has 30000 opening brackets: at most 1000"),
        ("SUPERVISOR__STALL", "x" * 70_000, "has 70000 characters"),
        ("SUPERVISOR__STALL", "!!python/object/apply:os.system [ls]", "is not YAML"),
        ("MODELS__B__CACHE_MODE", "Q8", "MODELCTL_MODELS__B__CACHE_MODE: models.b.cache_mode"),
    ],
)
def test_wrong_variables_are_named(tmp_path: Path, name: str, value: str, message: str) -> None:
    (problem,) = problems(tmp_path, **{name: value})
    assert message in problem


def test_a_name_that_two_models_share_means_neither(tmp_path: Path) -> None:
    entry = '{model_dir: "demo:letters", engine: transformers, gpu: cpu}'
    text = f"models:\n  a.b: {entry}\n  a-b: {entry}\n"
    (problem,) = examined(tmp_path, text, MODELS__A_B__MAX_BATCH_SIZE="3").problems
    assert "means several models of the file: a.b, a-b" in problem.message
