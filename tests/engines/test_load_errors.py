"""Models that cannot be loaded are refused in one line with a remedy."""

import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model_worker.engine import LoadError
from model_worker.engines import build_engine
from model_worker.engines.embedded.check import check
from model_worker.engines.exllamav2.check import check_directory
from model_worker.engines.exllamav2.meaning import open_directory
from model_worker.engines.model_dir import ModelDir
from protocol.process.worker_spec import EngineSpec
from tests.engines.random_model import edit_json, write_model, write_tokenizer


def load(path: Path, **fields: Any) -> None:
    build_engine(EngineSpec("m", "transformers", str(path), **fields)).load(lambda *_: None)


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(LoadError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert re.search(word, message), message


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_model(path)
    return path


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def write_safetensors(file: Path, names: list[str], shapes: dict[str, list[int]] | None = None) -> None:
    """Write a file with tensors of one number each, or of zeros in these shapes."""
    header, at = {}, 0
    for name in names:
        shape = (shapes or {}).get(name, [1])
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header)
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(at))


# by name


def test_unknown_engines() -> None:
    refused(lambda: build_engine(EngineSpec("m", "exlamav2", "/x")), "exlamav2", "did you mean 'exllamav2'")
    refused(lambda: build_engine(EngineSpec("m", "tea", "/x")), "known are transformers, exllamav2")
    refused(lambda: build_engine(EngineSpec("m", "no.such.module:Engine", "/x")), "cannot be imported")
    refused(lambda: build_engine(EngineSpec("m", "json:Engine", "/x")), "no class Engine")


def test_unknown_and_wrong_options() -> None:
    def build(engine: str, **options: Any) -> Callable[[], object]:
        return lambda: build_engine(EngineSpec("m", engine, "/x", device="cuda", options=options))

    refused(build("transformers", chunksize=1), "chunksize", "did you mean 'chunk_size'")
    refused(build("transformers", cache_mode="Q4"), "knows no option 'cache_mode'")
    refused(build("transformers", threads=0), "threads", "at least 1")
    refused(build("transformers", threads=True), "threads", "integer")
    refused(build("exllamav2", cache_size=1000), "cache_size", "multiple of 256", "1024")
    refused(build("exllamav2", cache_size=0), "cache_size", "at least 256")
    refused(build("exllamav2", chunk_size=300), "chunk_size", "multiple of 256", "512")
    refused(build("exllamav2", cache_mode="FP8"), "cache_mode", "FP16, Q8, Q6, Q4")
    refused(lambda: build_engine(EngineSpec("m", "exllamav2", "/x", device="cpu")), "CUDA", "engine: transformers")


# the directory


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["config.json"], "no config.json"),
        (["tokenizer.json"], "no tokenizer.json"),
        (["model.safetensors"], "no weights"),
    ],
)
def test_missing_files(model: Path, missing: list[str], words: str) -> None:
    for name in missing:
        (model / name).unlink()
    refused(lambda: load(model), words)


def test_missing_directory(tmp_path: Path) -> None:
    refused(lambda: load(tmp_path / "gone"), "gone", "no directory")


def test_pickles_are_not_loaded(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(lambda: load(model), "pytorch_model.bin", "safetensors")


def test_broken_files(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(lambda: load(model), "cut off")
    weights.write_bytes(b"\xff" * 64)
    refused(lambda: load(model), "no readable safetensors")
    weights.write_bytes(whole)
    (model / "tokenizer.json").write_text("{}")
    refused(lambda: load(model), "tokenizer.json")
    (model / "config.json").write_text("{]")
    refused(lambda: load(model), "config.json cannot be read")


def test_missing_tensors_are_not_made_up(model: Path) -> None:
    edit_json(model / "config.json", num_hidden_layers=3)
    refused(lambda: load(model), "describes 3 layers", "none with number 2")
    edit_json(model / "config.json", num_hidden_layers=2, intermediate_size=96)
    refused(lambda: load(model), r"gate_proj.weight has shape \[128, 64\], config.json describes \[96, 64\]")
    weights = load_file(model / "model.safetensors")
    edit_json(model / "config.json", intermediate_size=128)
    save_file({name: t for name, t in weights.items() if "1.mlp.up" not in name}, model / "model.safetensors")
    refused(lambda: load(model), "lack model.layers.1.mlp.up_proj.weight")


def test_missing_tensors_of_names_that_only_the_library_knows(model: Path) -> None:
    """The library finds the fault during the load."""
    write_model(model, "gpt2")
    edit_json(model / "config.json", n_inner=96)
    refused(lambda: load(model), "cannot be loaded|mismatched")
    edit_json(model / "config.json", n_inner=None)
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: t for name, t in weights.items() if "h.1.mlp.c_fc.weight" not in name}, model / "model.safetensors"
    )
    refused(lambda: load(model), "missing_keys", "h.1.mlp.c_fc")


def test_quantized_weights(model: Path) -> None:
    write_safetensors(model / "model.safetensors", ["model.layers.0.mlp.up_proj.q_weight"])
    refused(lambda: load(model), "exl2", "engine exllamav2")
    write_safetensors(model / "model.safetensors", ["model.layers.0.mlp.up_proj.qweight"])
    refused(lambda: load(model), "gptq", "engine exllamav2")
    edit_json(model / "config.json", quantization_config={"quant_method": "awq"})
    refused(lambda: load(model), "AWQ", "16-bit weights")
    refused(lambda: check_directory(ModelDir(str(model))), "AWQ", "EXL2 weights, GPTQ")


@pytest.mark.parametrize(
    ("rows", "groups", "size", "right"),
    [
        (256, 2, 128, True),
        (256, 1, -1, True),  # one group of any size
        (11008, 86, 128, True),
        (11008, 87, 128, False),  # one group more than the rows need
        (96, 2, 64, True),  # the last group is half as long
        (192, 2, 96, False),  # the package would compute with 128 and 64
        (4032, 42, 96, False),
        (256, 16, 16, False),  # the kernels work in steps of 32
        (256, 16, None, False),
        (256, 2, 64, False),
    ],
)
def test_sizes_of_gptqs_groups(model: Path, rows: int, groups: int, size: int | None, right: bool) -> None:
    """The package takes the smallest power of two that suits, and does not read the declared size."""
    shapes = {"l.qweight": [rows // 8, 8], "l.scales": [groups, 8]}
    write_safetensors(model / "model.safetensors", list(shapes), shapes)
    (model / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": size}))
    edit_json(model / "config.json", rope_parameters=None, rope_theta=10000.0)
    if right:
        check_directory(ModelDir(str(model)))
    else:
        refused(lambda: check_directory(ModelDir(str(model))), f"{groups} groups for {rows} rows", "l.scales")


def test_forms_of_gptq(model: Path) -> None:
    write_safetensors(model / "model.safetensors", ["l.qweight"])
    (model / "quantize_config.json").write_text('{"bits": 8}')
    refused(lambda: check_directory(ModelDir(str(model))), "8 bits", "4 bits only")
    declared = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
    edit_json(model / "config.json", quantization_config=declared)
    refused(lambda: check_directory(ModelDir(str(model))), "marlin", "gptq_v2")


def test_unsupported_architectures(model: Path) -> None:
    edit_json(model / "config.json", architectures=["BertModel"])
    refused(lambda: load(model), "BertModel")
    refused(lambda: check_directory(ModelDir(str(model))), "BertModel", "compute it as Llama")
    edit_json(model / "config.json", architectures=["LlamaForCausalLM", "MistralForCausalLM"])
    refused(lambda: load(model), "one architecture")
    edit_json(model / "config.json", architectures=["LlamaForCausalLM"], layer_types=["full_attention", "mamba"])
    refused(lambda: load(model), "mamba")


def embedded_check(model: Path, context: int | None = None) -> None:
    check(EngineSpec("m", "transformers", str(model), max_seq_len=context))


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM", "MambaForCausalLM", "RwkvForCausalLM"])
def test_architectures_that_the_engine_cannot_step(model: Path, name: str) -> None:
    """The check finds them by the library's source, without importing it."""
    edit_json(model / "config.json", architectures=[name])
    refused(lambda: embedded_check(model), f"architecture {name} takes no", "different lengths together")


def test_positions_that_are_part_of_a_mask(model: Path) -> None:
    edit_json(model / "config.json", alibi=True)
    refused(lambda: embedded_check(model), "alibi is true")
    edit_json(model / "config.json", alibi=False, attention_types=[[["global", "local"], 1]])
    refused(lambda: embedded_check(model, 512), "sliding window of 256", "max_seq_len")
    embedded_check(model, 256)


def test_sliding_windows_are_refused_where_they_matter(model: Path) -> None:
    write_model(model, "mistral", sliding_window=64)
    refused(lambda: load(model), "sliding window of 64", "max_seq_len")
    load(model, max_seq_len=64)


def test_rotary_embeddings_that_depend_on_the_length(model: Path) -> None:
    edit_json(model / "config.json", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    refused(lambda: load(model), "dynamic")


def test_contexts_that_cannot_be(model: Path) -> None:
    refused(lambda: load(model, max_seq_len=513), "max_seq_len is 513", "512")
    refused(lambda: load(model, max_seq_len=1), "at least 2")
    edit_json(model / "config.json", max_position_embeddings=10**9)
    refused(lambda: load(model), "not enough memory", "GiB", "max_seq_len or max_batch_size")
    edit_json(model / "config.json", max_position_embeddings=None)
    refused(lambda: load(model), "set max_seq_len")


def test_chat_templates_that_cannot_be_read(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    refused(lambda: load(model), "chat template")


# files that ExLlamaV2 would misread


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Make a directory that ExLlamaV2 accepts."""
    write_tokenizer(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", ["model.norm.weight"])
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}))
    check_directory(ModelDir(str(tmp_path)))
    return tmp_path


def test_rope_parameters_of_transformers_5(plain: Path) -> None:
    """They become the keys of older files, and so does the pair of equal types that some tools write."""

    def read(**changes: Any) -> tuple[Any, Any]:
        without = dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"))
        edit_json(plain / "config.json", **(without | changes))
        directory = open_directory(str(plain))
        check_directory(directory)
        return directory.config.get("rope_theta"), directory.config.get("rope_scaling")

    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == (5e5, None)
    linear = {"rope_type": "linear", "factor": 2}
    assert read(rope_parameters=linear | {"rope_theta": 5e5}) == (5e5, linear)
    assert read(rope_theta=5e5, rope_scaling=linear | {"type": "linear"}) == (5e5, linear)
    full = linear | {"rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    assert read(rope_parameters={"full_attention": full, "sliding_attention": sliding}) == (1e6, linear)
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert read(rope_theta=5e5, rope_scaling=dynamic) == (5e5, None), "exact up to the model's own context"
    edit_json(plain / "config.json", max_position_embeddings=2048)
    refused(lambda: open_directory(str(plain)).context(2049), "max_seq_len is 2049")
    refused(
        lambda: read(rope_parameters={"full_attention": full, "sliding_attention": sliding | {"rope_theta": 5e4}}),
        "differ by layer",
    )


def test_every_end_token_is_found(plain: Path) -> None:
    edit_json(plain / "config.json", eos_token_id=7)
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert ModelDir(str(plain)).eos_ids(lambda token: {"</s>": 1}.get(token)) == {1, 7, 8, 9}


def in_a_process(program: str, *flags: str) -> None:
    subprocess.run([sys.executable, *flags, "-c", program], check=True, timeout=60)


@pytest.mark.long
def test_assertions_must_be_on() -> None:
    in_a_process(
        """
from model_worker.engine import LoadError
from model_worker.engines.exllamav2.load import import_package
try:
    import_package()
except LoadError as e:
    if "-O" not in str(e): raise
else:
    raise SystemExit("not refused")
""",
        "-O",
    )


def test_only_engine_modules_import_torch() -> None:
    in_a_process(
        """
import sys
import model_worker.engines, model_worker.text
import model_worker.engines.admission, model_worker.engines.model_dir
import model_worker.engines.model_dir, model_worker.engines.tokenizer
from model_worker.engines.exllamav2 import check, extension, vram
from model_worker.engines.embedded import check
assert not {"torch", "transformers", "exllamav2"} & set(sys.modules)
"""
    )
