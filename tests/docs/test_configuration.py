"""Each key on the configuration page has a text, a default and an example that the schema accepts."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from model_worker.engines.exllamav2.options import DEFAULT_CHUNK_SIZE
from protocol.process.worker_spec import WorkerSpec
from supervisor.config.file import ModelSpec
from supervisor.config.models import ENGINE_KEYS, ModelConfig, marked
from supervisor.config.reading import fit
from supervisor.config.server import FileConfig, SupervisorConfig
from supervisor.fleet.turnovers import Change, changes
from tools.docs.configuration import ENGINE_OPTIONS, Key, all_keys, example_value, keys_of

KEYS = {key.path: key for key in all_keys()}
PATHS = ("model_dir", "draft_model", "lora", "chat_template")
"""Keys of a model whose paths ``ModelSpec`` gets in another way."""


def file_with(key: Key) -> dict[str, Any]:
    """Return a models.yaml with a key's example and the keys that are required beside it."""
    *sections, name = key.path.split(".")
    value: Any = {name: example_value(key)}
    for section in reversed(sections):
        value = {section: value}
    if key.path == "groups.NAME.loaded":
        value["groups"]["NAME"]["models"] = ["m"]
    if sections == ["folders"]:
        value = {"folders": [{"path": "/data/models"} | value["folders"]]}
    if key.path == "folders" or sections == ["folders"]:
        return {"models": {}, **value}
    if sections[:1] in (["supervisor"], ["gateway"], ["cluster"], ["groups"]) or key.path in ("groups", "defaults"):
        return {"models": {"m": {"model_dir": "."}}, **value}
    if sections == ["lora"]:
        value = {"lora": [{"dir": "."} | value["lora"]]}
    if key.path == "default_model":
        return {"models": {"qwen": {"model_dir": "."}}, **value}
    return {"models": {"m": {"model_dir": "."} | value}}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_the_example_of_a_key_is_a_value_that_it_may_have(key: Key) -> None:
    fit(FileConfig, file_with(key))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_has_a_type_a_default_and_a_sentence(key: Key) -> None:
    assert key.type != "value"
    assert key.default
    assert key.description.rstrip(")").endswith(".")


def test_every_key_of_a_model_is_there_with_its_engines() -> None:
    for field in fields(ModelConfig):
        engines = [engine for engine, keys in ENGINE_KEYS.items() if field.name in keys]
        expected = ", ".join(engines) or ("an import string" if field.name == "options" else "all")
        assert KEYS[field.name].engines == expected


def test_defaults_come_from_the_schema_and_from_the_engines() -> None:
    assert KEYS["max_queue"].default == "`256`"
    assert KEYS["supervisor.watch.load"].default == "`5m`"
    assert KEYS["supervisor.restart.initial"].default == "`500ms`"
    assert KEYS["cache_mode"].default == "`FP16`"
    assert KEYS["threads"].default == "`1`"
    assert KEYS["model_dir"].default == "required"
    assert f"{DEFAULT_CHUNK_SIZE} for exllamav2" in KEYS["chunk_size"].default
    assert "`256` for transformers" in KEYS["chunk_size"].default
    assert KEYS["graphs"].default == "`true`", "once, though the key's text and the engine's options say it"
    assert KEYS["supervisor.held.client"].default == "`16MiB`"


@pytest.mark.parametrize(
    "key", [key for key in keys_of(ModelConfig) if key.path not in (*PATHS, "engine")], ids=lambda key: key.path
)
def test_the_field_of_a_key_says_whether_a_change_exchanges_the_workers(key: Key) -> None:
    own = {"model_dir": ".", "engine": "transformers"}
    before, after = (
        ModelSpec("a", fit(ModelConfig, own | keys), Path("/models/a")) for keys in ({}, {key.path: example_value(key)})
    )
    # Another number of workers is an exchange. A lazy model may sleep, which its worker prepares for.
    exchanges = key.path in (*marked(ModelConfig, "workers"), "replicas", "lazy")
    expected = Change.WORKERS if exchanges else Change.SETTINGS
    assert changes({"a": [before]}, {"a": after}) == {"a": expected}


def test_what_the_fields_say_fits_what_reads_the_keys() -> None:
    assert {*marked(ModelConfig, "told")} <= {each.name for each in fields(WorkerSpec)}
    for engine, known in ENGINE_KEYS.items():
        assert known - {"lora"} <= {each.name for each in fields(ENGINE_OPTIONS[engine])}
    kinds = (ModelConfig, SupervisorConfig, FileConfig)
    marks = {mark for kind in kinds for each in fields(kind) for mark in each.metadata}
    assert marks == {"workers", "told", "engines", "lazy", "one", "later", "at_start", "text"}


@dataclass(frozen=True)
class WithoutText:
    key: int = 1


@dataclass(frozen=True)
class WithoutExample:
    key: int = 1
    """What the key means."""


@dataclass(frozen=True)
class WithoutDefault:
    key: int | None = None
    """What the key means.

    Example: 1
    """


@dataclass(frozen=True)
class WithTwoDefaults:
    key: int = 1
    """What the key means.

    Default: 1
    Example: 1
    """


@pytest.mark.parametrize("kind", [WithoutText, WithoutExample, WithoutDefault, WithTwoDefaults])
def test_a_key_that_lacks_something_is_refused_by_name(kind: type) -> None:
    with pytest.raises(ValueError, match="key"):
        list(keys_of(kind))
