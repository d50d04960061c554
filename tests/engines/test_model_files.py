"""The files of a model's directory, as they are met in the world: what is read, what is left alone, what is refused."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from model_worker.engine import LoadError
from model_worker.engines import build_engine
from model_worker.engines.embedded.check import check as check_embedded
from model_worker.engines.exllamav2.check import check as check_exllamav2
from model_worker.engines.model_dir import ModelDir, find_template, read_header
from model_worker.engines.tokenizer import Tokenizer
from model_worker.engines.vetting import TEMPLATE_BYTES, parse_json
from protocol.process.worker_spec import EngineSpec
from tests.engines.hostile_directories import DEMO
from tests.engines.random_model import edit_json, write_tokenizer

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


# special tokens


@pytest.mark.parametrize(
    ("config", "mapped", "bos"),
    [
        ({}, {"bos_token": "<s>"}, "<s>"),
        ({}, {"bos_token": {"content": "<s>", "lstrip": False}}, "<s>"),
        ({"bos_token": "</s>"}, {"bos_token": "<s>"}, "<s>"),
        ({"bos_token": "<s>"}, {"eos_token": "</s>"}, "<s>"),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "</s>"}, "<s>"),
        ({"bos_token": None}, {"bos_token": "<s>"}, "<s>"),
        ({"bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "<s>"}, None),
        ({"bos_token": "<s>"}, {"bos_token": ["x"]}, None),
    ],
)
def test_special_tokens_map_is_read_as_in_transformers(
    model: Path, config: dict[str, Any], mapped: dict[str, Any], bos: str | None
) -> None:
    write_tokenizer(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    (model / "special_tokens_map.json").write_text(json.dumps(mapped))
    ours = ModelDir(str(model)).special_tokens
    assert ours.get("bos_token") == bos
    if not isinstance(mapped.get("bos_token"), list):
        theirs = transformers.AutoTokenizer.from_pretrained(str(model)).special_tokens_map
        assert {name: text for name, text in theirs.items() if name in ours} == ours


def test_a_beginning_that_stands_only_there_is_in_front_of_prompts(model: Path) -> None:
    write_tokenizer(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    tokenizer = Tokenizer(ModelDir(str(model)))
    assert tokenizer.encode("hi")[0] == tokenizer.token_id("<s>")
    assert tokenizer.token_id("</s>") in tokenizer.eos_ids
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


# chat templates


def test_the_first_file_with_a_template_counts(model: Path) -> None:
    def found() -> tuple[str, str] | None:
        template = find_template(ModelDir(str(model)))
        return None if template is None else (template.file, template.source)

    edit_json(model / "tokenizer_config.json", chat_template=None)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert found() is None
    edit_json(model / "tokenizer_config.json", chat_template="config")
    assert found() == ("tokenizer_config.json", "config")
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found() == ("chat_template.json", "json")
    (model / "chat_template.json").write_text(json.dumps({"chat_template": {"default": "named", "tool_use": "tools"}}))
    assert found() == ("chat_template.json", "named")
    (model / "chat_template.jinja").write_text("jinja")
    assert found() == ("chat_template.jinja", "jinja")
    (model / "chat_template.json").write_text("[")
    with pytest.raises(LoadError, match=r"chat_template\.json cannot be read"):
        found()


def test_models_yaml_names_a_template(model: Path, tmp_path: Path) -> None:
    def found(wanted: str) -> tuple[str, str, str | None]:
        directory = ModelDir(str(model))
        directory.chat_template = str(wanted)
        template = find_template(directory)
        assert template is not None
        return template.file, template.source, template.tool_source

    several = [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "tools"}]
    edit_json(model / "tokenizer_config.json", chat_template=several)
    (model / "chat_template.jinja").write_text("jinja")
    assert found("tool_use") == ("tokenizer_config.json, tool_use", "tools", None)
    assert found("default") == ("tokenizer_config.json, default", "usual", None)
    with pytest.raises(LoadError, match="has no chat template 'rag': there is default, tool_use") as caught:
        found("rag")
    assert caught.value.key == "chat_template"
    place = tmp_path / "templates"
    place.mkdir()
    file = place / "mine.jinja"
    file.write_text("mine")
    assert found(str(file)) == (str(file), "mine", None)
    (tmp_path / "secret").write_text("secret")
    (place / "link.jinja").symlink_to(tmp_path / "secret")
    os.mkfifo(place / "pipe.jinja")
    (place / "large.jinja").write_bytes(b"x" * (TEMPLATE_BYTES + 1))
    (place / "bytes.jinja").write_bytes(b"\xff")
    (place / "empty.jinja").write_text("")
    for name in ("link", "pipe", "large", "bytes", "empty", "none"):
        with pytest.raises(LoadError, match=f"{name}.jinja") as caught:
            found(str(place / f"{name}.jinja"))
        assert caught.value.key == "chat_template"
        assert "secret" not in str(caught.value).replace(str(tmp_path / "secret"), "")


def test_the_engines_take_the_template_that_models_yaml_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    spec = EngineSpec("m", "transformers", str(DEMO), options={"chat_template": str(file)})
    checked = check_embedded(spec)
    assert checked.tokenizer is not None
    assert checked.tokenizer.chat_template is not None
    assert checked.tokenizer.chat_template.source == "mine"
    file.write_text("{% if %}")
    with pytest.raises(LoadError, match=f"the chat template {file} cannot be read: ") as caught:
        check_embedded(spec)
    assert caught.value.key == "chat_template"


# directories that cannot be served say what they are


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by AWQ"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by FP8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized by bitsandbytes"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quantized by EXL3"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}, "NVFP4"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantized by compressed-tensors"),
        ({"compression_config": {"format": "pack-quantized"}}, "quantized by compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantized by MLX"),
    ],
)
def test_foreign_formats_are_named_and_their_left_behind_keys_are_no_fault(
    model: Path, keys: dict[str, Any], says: str
) -> None:
    edit_json(model / "config.json", **keys)
    assert ModelDir(str(model)).quantization is None  # the weights have 16 bits
    file = model / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.0.self_attn.q_proj.packed": torch.zeros(8, dtype=torch.uint8)}, file)
    for check, engine in ((check_embedded, "transformers"), (check_exllamav2, "exllamav2")):
        with pytest.raises(LoadError) as caught:
            check(EngineSpec("m", engine, str(model), device="cuda"))
        found = [message for message in map(str, (caught.value, *caught.value.also)) if says in message]
        assert found, str(caught.value)
        assert "which no engine here loads: use the model's EXL2 weights" in found[0]


def test_a_left_behind_key_of_bitsandbytes_changes_nothing(model: Path) -> None:
    edit_json(model / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    load(model)


def test_pointers_of_git_lfs_are_told(model: Path) -> None:
    """``git clone`` without git-lfs leaves them in place of large files; which files these are, the repository says."""
    for name in (
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "quantize_config.json", "model.safetensors", "model.safetensors.index.json",
    ):  # fmt: skip
        kept = (model / name).read_bytes() if (model / name).exists() else None
        (model / name).unlink(missing_ok=True)
        (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n")
        assert f"{name} is a pointer of Git LFS, not the file itself: run `git lfs pull`" in refused(model)
        (model / name).write_bytes(b"")  # what an interrupted download leaves
        assert refused(model) == f"{model / name} is empty: download it again"
        (model / name).unlink()
        if kept is not None:
            (model / name).write_bytes(kept)
    ModelDir(str(model))


@pytest.mark.parametrize(
    "metadata",
    [
        "null", "{}", '{"format": "pt"}', '{"a": "\\u0000"}', "[]", '""', "1", "true", '[["a", "b"]]', '{"a": 1}',
        '{"a": null}', '{"a": {}}', '{"a": ["b"]}', '{"a": "\\ud800"}', '{"\\ud800": "a"}', '{"a": 1e999}', "Infinity",
        '{}, "__metadata__": {}', '{"a": 1}, "__metadata__": {}', '{}, "b": {"shape": [], "shape": []}',
        '{}, "\\udfff": {"dtype": "F16", "shape": [0], "data_offsets": [4, 4]}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [0, 1])
def test_a_header_is_refused_where_the_library_refuses_it(tmp_path: Path, metadata: str, more: int) -> None:
    """``check`` said that such a file was fine, and each load of it failed."""
    file = tmp_path / "model.safetensors"
    head = f'{{"__metadata__": {metadata}, "a": {{"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}}}'.encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(4 + more))
    try:
        with safe_open(file, framework="pt"):
            opens = True
    except SafetensorError:
        opens = False
    if opens:
        assert list(read_header(file)) == ["a"]
    else:
        with pytest.raises(LoadError, match=r"download it again$"):
            read_header(file)


def test_other_tokenizers_ggufs_and_adapters_are_told(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    assert "has no tokenizer.json, only tokenizer.model, which is not read: download" in refused(model)
    (model / "model.safetensors").rename(model / "m.Q4_1.gguf")
    (model / "config.json").unlink()
    assert "holds GGUF weights (m.Q4_1.gguf), which no engine here loads" in refused(model)
    (model / "adapter_config.json").write_text("{}")
    assert "holds an adapter, not a model: name it under lora" in refused(model)
