"""The JSON schema of models.yaml: it accepts every example, and refuses what the supervisor refuses, too."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from jsonschema import Draft7Validator

from modelctl.cli.options import SCHEMA
from protocol.values import ReadWith
from supervisor.config.file import examine_config
from supervisor.config.models import NO_DEFAULTS, LoraConfig, ModelConfig, VariantConfig
from supervisor.config.yaml_source import ConfigError, YamlSource
from tests.cli.programs import modelctl
from tests.serving import ROOT
from tools.docs import models_schema
from tools.docs.configuration import Key, all_keys, example_value, keys_of

VALIDATOR = Draft7Validator(json.loads(SCHEMA.read_text()))
KEYS = {key.path: key for key in all_keys()}
DEMO: dict[str, Any] = {"model_dir": "demo:letters", "engine": "transformers"}
ON_GPUS: dict[str, Any] = {"model_dir": "demo:letters", "gpu": [0, 1]}


def documented() -> Iterator[Any]:
    """Yield every whole models.yaml that stands in the documentation, and the shipped one."""
    yield pytest.param((ROOT / "models.yaml").read_text(), id="models.yaml")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, block in enumerate(block for block in blocks if re.search(r"^models:(?! \[)", block, re.MULTILINE)):
            yield pytest.param(block, id=f"{page.name}, {number}")


def faults(directory: Path, text: str) -> list[str]:
    """Return what the schema refuses. Keys are text, as the supervisor and editors take them."""
    file = directory / "models.yaml"
    file.write_text(text)
    return [error.message for error in VALIDATOR.iter_errors(YamlSource(file).data)]


def file_with(key: Key) -> dict[str, Any]:
    """Return a file that holds a key's example, with an engine that knows the key."""
    *sections, name = key.path.split(".")
    value: Any = {name: example_value(key)}
    for section in reversed(sections):
        value = {section: value}
    if key.path == "groups.NAME.loaded":
        value["groups"]["NAME"]["models"] = ["m"]
    if sections[:1] in (["supervisor"], ["gateway"], ["cluster"], ["groups"]) or key.path in ("groups", "defaults"):
        return {"models": {"m": DEMO}, **value}
    if key.path == "default_model":
        return {"models": {"qwen": DEMO}, **value}
    if sections == ["folders"]:
        value = {"folders": [{"path": "/data/models"} | value["folders"]]}
    if key.path == "folders" or sections == ["folders"]:
        return value
    if sections == ["lora"]:
        value = {"lora": [{"dir": "."} | value["lora"]]}
    custom = {"model_dir": ".", "engine": "my_engine:Mine"}
    engine = custom if name == "options" else DEMO if "transformers" in key.engines or name == "engine" else ON_GPUS
    engine = {"model_dir": ".", "engine": "embedding"} if key.engines == "embedding" else engine
    return {"models": {"m": engine | value}}


def test_the_schema_is_one() -> None:
    Draft7Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("text", [*documented()])
def test_every_documented_file_is_accepted(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text) == []


def test_what_the_defaults_have_a_model_need_not_have(tmp_path: Path) -> None:
    file = {"defaults": {"gpu": "auto", "cache_mode": "Q8"}, "models": {"m": {"model_dir": "demo:letters"}}}
    assert faults(tmp_path, yaml.safe_dump(file)) == []
    assert faults(tmp_path, yaml.safe_dump({**file, "defaults": {"engine": "transformers"}})) == []


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_every_documented_value_is_accepted(tmp_path: Path, key: Key) -> None:
    assert faults(tmp_path, yaml.safe_dump(file_with(key))) == []


def verdict(directory: Path, entry: dict[str, Any], defaults: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """Return what the supervisor makes of a file with one model, its problems, and whether the schema accepts it."""
    file = {"models": {"m": entry}} | ({} if defaults is None else {"defaults": defaults})
    accepted = faults(directory, yaml.safe_dump(file)) == []
    examined = examine_config(directory / "models.yaml")
    found = [spec.config for spec in examined.config.models.values()]
    return found, [re.sub("^.*?: models", "models", str(problem)) for problem in examined.problems], accepted


def with_key(kind: type, name: str, *value: Any) -> dict[str, Any]:
    """Return keys of a model that hold a key of a class, and what is required beside it. No value: leave it out."""
    given = dict.fromkeys([name], *value) if value else {}
    if kind is ModelConfig:
        return given
    return {"lora": [{"dir": "."} | given]} if kind is LoraConfig else {"variants": {"v": given}}


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        pytest.param(kind, key, id=f"{kind.__name__}.{key.path}")
        for kind in (ModelConfig, LoraConfig, VariantConfig)
        for key in keys_of(kind)
    ],
)
def test_null_stands_for_a_key_that_is_left_out(tmp_path: Path, kind: type, key: Key) -> None:
    name, sound = key.path, 0
    for engine in (DEMO, ON_GPUS, {"model_dir": ".", "engine": "my_engine:Mine"}):
        model = {own: value for own, value in (engine | {"lazy": True}).items() if own != name}
        null, left_out = ({**model, **with_key(kind, name, *value)} for value in ([None], []))
        if key.default == "required":
            _, problems, accepted = verdict(tmp_path, null)
            assert any(problem.endswith(f"{name}: is null: must be a path") for problem in problems)
            assert not accepted
            continue
        configs, problems, accepted = expected = verdict(tmp_path, left_out)
        assert accepted == (problems == []), "exllamav2 needs a GPU, and adapters need exllamav2"
        sound += accepted
        assert verdict(tmp_path, null) == expected
        if kind is ModelConfig and name not in NO_DEFAULTS:
            assert verdict(tmp_path, left_out, {name: None}) == (configs, problems, True)
            assert verdict(tmp_path, null, {name: example_value(key)}) == (configs, problems, True)
        elif kind is VariantConfig:
            assert verdict(tmp_path, null, with_key(kind, name, example_value(key))) == (configs, problems, True)
    assert sound or key.default == "required"


def test_a_value_of_any_type_may_name_a_variable(tmp_path: Path) -> None:
    text = """\
models:
  m: {model_dir: "${PLACE}/m", engine: "${ENGINE}", gpu: "${GPU:-0}", replicas: "${COUNT}", lazy: "${LAZY}",
      cache_mode: "${MODE}", gpu_split: ["${A}", 20], vram: "${SIZE}", ttl: "${TTL}", sampling: {top_p: "${P}"},
      limits: {max_tokens: "${MOST}"}, lora: [{dir: x, scaling: "${FACTOR}"}], step_timeout: "${STEP}"}
supervisor: {usage: {keep: "${DAYS}"}, held: {all: "${HELD}"}, restart: {limit: "${LIMIT}"}}
gateway: {auth: "${AUTH}", processes: "${COUNT}", max_body: "${BODY}"}
"""
    assert faults(tmp_path, text) == []
    assert faults(tmp_path, text.replace("${COUNT}", "COUNT")) != []


def test_a_form_of_values_without_a_schema_is_named_with_the_place_to_add_it() -> None:
    def parse_colour(value: object) -> str:
        return str(value)

    with pytest.raises(ValueError, match=r"'colour' .*of parse_colour.* _READ of tools/docs/models_schema.py"):
        models_schema._of(Annotated[str, ReadWith(parse_colour, "colour")] | None)


def test_what_init_writes_is_accepted_and_names_the_schema(tmp_path: Path) -> None:
    for arguments in ([], [ROOT / "model_worker" / "demo_models"]):
        assert modelctl("init", "--force", *arguments, cwd=tmp_path).returncode == 0
        text = (tmp_path / "models.yaml").read_text()
        assert text.count("yaml-language-server") == 1
        assert text.startswith(f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n")
        assert faults(tmp_path, text) == []


def test_the_samples_own_first_line_leads_to_the_schema() -> None:
    first, _, _ = (ROOT / "models.yaml").read_text().partition("\n")
    assert (ROOT / first.removeprefix("# yaml-language-server: $schema=")).samefile(SCHEMA)


def test_a_command_prints_the_schema() -> None:
    done = modelctl("check", "--json-schema")
    assert (done.returncode, done.stdout) == (0, SCHEMA.read_text())


def model(**keys: Any) -> dict[str, Any]:
    return {"models": {"m": DEMO | keys}}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"models": {}},
        {"models": []},
        {"models": {"m": {"engine": "transformers"}}},
        {"models": {"Big": DEMO}},
        {"models": {"gateway": DEMO}},
        {"model": {"m": DEMO}, "models": {"m": DEMO}},
        model(model_dri="demo:letters"),
        model(engine="transfomers"),
        model(gpu=-1),
        model(gpu=[]),
        model(gpu=[0, 0]),
        model(gpu="cuda"),
        model(max_seq_len="16k"),
        model(max_batch_size=0),
        model(lazy="yes"),
        model(lazy=True, ttl=0),
        model(replicas=65),
        model(vram="lots"),
        model(step_timeout=0.5),
        model(cache_mode="Q8"),
        model(options={"rate": 1}),
        model(sampling={"temprature": 1}),
        model(sampling={"temperature": 11}),
        model(limits={"max_tokens": "many"}),
        {"models": {"m": {"model_dir": "demo:letters"}}},
        {"models": {"m": {"model_dir": "demo:letters", "gpu": "cpu"}}},
        {"models": {"m": ON_GPUS | {"threads": 4}}},
        {"models": {"m": ON_GPUS | {"cache_mode": "Q5"}}},
        {"models": {"m": ON_GPUS | {"gpu_split": ["all"]}}},
        {"models": {"m": ON_GPUS | {"lora": [{"scaling": 1}]}}},
        {**model(), "supervisor": {"stop": {"drian": "2m"}}},
        {**model(), "supervisor": {"stop": {"drain": "2 minutes"}}},
        {**model(), "supervisor": {"restart": {"limit": 0}}},
        {**model(), "supervisor": {"listen": "192.168.1.5:5570"}},
        {**model(), "supervisor": {"vram_limit": {"first": "20GiB"}}},
        {**model(), "supervisor": None},
        {**model(), "defaults": {"cache_mod": "Q8"}},
        {**model(), "defaults": {"model_dir": "demo:stories"}},
        {**model(), "defaults": {"ttl": 0}},
        {**model(cache_mode="Q8"), "defaults": {"lazy": True}},
        {**model(), "gateway": {"auth": "nobody"}},
        {**model(), "gateway": {"listen": 70000}},
        {**model(), "gateway": {"cors_origins": ["chat.example.org"]}},
        {**model(), "gateway": {"processes": 1.5}},
    ],
    ids=json.dumps,
)
def test_what_is_wrong_is_refused_by_the_schema_and_by_the_supervisor(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert faults(tmp_path, yaml.safe_dump(wrong))
    try:
        problems = examine_config(tmp_path / "models.yaml").problems
    except ConfigError as e:
        problems = e.problems
    assert problems
