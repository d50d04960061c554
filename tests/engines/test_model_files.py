"""The files of a model's directory, as they are met in the world: what is read, what is left alone, what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from model_worker.engine import LoadError
from model_worker.engines import build_engine
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.vetting import parse_json
from protocol.process.worker_spec import EngineSpec
from tests.engines.hostile_directories import DEMO
from tests.engines.random_model import edit_json

VERY_LARGE_INTEGER = int(1e30)
"""The length that transformers writes for "without a limit": 1000000000000000019884624838656."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    return tmp_path / "model"


def load(model: Path) -> None:
    build_engine(EngineSpec("m", "transformers", str(model), max_batch_size=1)).load(lambda *_: None)


def refused(model: Path) -> str:
    with pytest.raises(LoadError) as caught:
        ModelDir(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# limits


def test_a_length_without_a_limit_is_no_fault(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", model_max_length=VERY_LARGE_INTEGER)
    load(model)
    assert ModelDir(str(model)).context(None) == 2048


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
        (str(VERY_LARGE_INTEGER), 1e30),
        ("9" * 4300, float("inf")),
        ("-" + "9" * 4299, float("-inf")),
    ],
)
def test_integers_beyond_64_bits_become_floats(text: str, value: float) -> None:
    read = parse_json(b'{"a": %s}' % text.encode())["a"]
    assert (read, type(read)) == (value, type(value))


def test_integers_that_no_package_can_read_are_refused() -> None:
    with pytest.raises(ValueError, match="4301 digits, Python reads at most 4300"):
        parse_json(b'{"a": %s}' % (b"9" * 4301))
    with pytest.raises(ValueError, match="integer string conversion"):
        json.loads("9" * 4301)


@pytest.mark.parametrize("name", ["tekken.json", "trainer_state.json", "params.json", "notes/old.jinja", "x.jinja"])
def test_files_that_nobody_reads_have_no_limits(model: Path, name: str) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    with open(model / name, "wb") as file:
        file.write(b"{ no JSON")
        file.truncate(1 << 40)
    load(model)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "quantize_config.json", "preprocessor_config.json", "tokenizer.json",
        "model.safetensors.index.json", "chat_template.jinja", "chat_template.json",
    ],
)  # fmt: skip
def test_files_that_are_read_have_limits(model: Path, name: str) -> None:
    with open(model / name, "ab") as file:
        file.truncate(1 << 40)
    assert f"{name} has 1099511627776 bytes, such a file has at most" in refused(model)


# which files are the weights


def test_engine_transformers_says_which_names_it_reads(model: Path) -> None:
    (model / "model.safetensors").rename(model / "output.safetensors")
    assert ModelDir(str(model)).weights == [model / "output.safetensors"]
    with pytest.raises(LoadError, match=r"has its weights in output\.safetensors"):
        load(model)
    names = dict.fromkeys(ModelDir(str(model)).tensors, "output.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(LoadError, match="has no key metadata"):
        load(model)
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    shutil.copy(model / "output.safetensors", model / "consolidated.safetensors")
    load(model)
