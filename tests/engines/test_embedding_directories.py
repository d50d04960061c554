"""Directories of embedding models that are wrong: the error names the file, the key, the value and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model_worker.engine import LoadError
from model_worker.engines.embedding.directory import check
from protocol.process.worker_spec import EngineSpec
from tests.engines.tiny_embedding import describe, write

Change = Callable[[Path], object]


def put(name: str, value: Any) -> Change:
    """Return a change that writes a file. Text is written as it is."""
    return lambda directory: (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def edit(name: str, **values: Any) -> Change:
    """Return a change of some keys of a JSON file."""

    def change(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def module(number: int, **values: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "modules.json"
        modules = json.loads(file.read_text())
        modules[number] |= values
        file.write_text(json.dumps(modules))

    return change


def faults_of(directory: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as e:
        check(EngineSpec("m", "embedding", str(directory), options=options))
    return "\n".join(map(str, (e.value, *e.value.also)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return describe(write(tmp_path, "bert"))


POOLING = "1_Pooling/config.json"
WRONG: dict[str, tuple[Change, str]] = {
    "no JSON": (put("modules.json", "[{"), "modules.json cannot be read"),
    "closes what it did not open": (put("modules.json", '1},"a":{'), "modules.json cannot be read"),
    "no text": (lambda d: (d / "modules.json").write_bytes(b"\xff"), "cannot be read: it is no UTF-8 text"),
    "no list": (put("modules.json", {"a": 1}), "modules.json must have a list of modules, not {'a': 1}"),
    "empty": (put("modules.json", []), "modules.json must have a list of modules, not []"),
    "numbers": (put("modules.json", [1]), "module 0 is 1: it must have the texts type and path"),
    "outside": (module(1, path="../1_Pooling"), "path is '../1_Pooling' for module 1: must be a directory beside"),
    "above": (module(1, path=".."), "path is '..' for module 1"),
    "absolute": (module(1, path="/etc"), "path is '/etc' for module 1"),
    "unknown first": (module(0, type="a.CLIPModel"), "the first module is 'CLIPModel': only Transformer"),
    "unknown later": (module(2, type="a.b.LSTM"), "type 'LSTM' at this place is not supported"),
    "elsewhere": (module(0, path="0_Transformer"), "path is '0_Transformer' for the Transformer: move the files"),
    "no pooling": (lambda d: (d / POOLING).unlink(), "1_Pooling/config.json cannot be read"),
    "pooling unknown": (edit(POOLING, pooling_mode="median"), "pooling_mode 'median' is not known: known are cls"),
    "pooling a number": (edit(POOLING, pooling_mode=3), "pooling_mode is 3: must be one of cls"),
    "all false": (
        put(POOLING, {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False}),
        "names no pooling (all pooling_mode_… are false): set pooling in models.yaml",
    ),
    "old a text": (put(POOLING, {"pooling_mode_mean_tokens": "yes"}), "pooling_mode_mean_tokens is 'yes': must be"),
    "another size": (edit(POOLING, embedding_dimension=384), "embedding_dimension is 384, and config.json describes"),
    "prompt a text": (edit(POOLING, include_prompt="no"), "include_prompt is 'no': must be true or false"),
    "length a text": (put("sentence_bert_config.json", {"max_seq_length": "x"}), "max_seq_length is 'x': must be"),
    "length 0": (put("sentence_bert_config.json", {"max_seq_length": 0}), "max_seq_length is 0: must be at least 2"),
    "prompts a list": (put("config_sentence_transformers.json", {"prompts": []}), "prompts is []: must be an object"),
    "a prompt a number": (put("config_sentence_transformers.json", {"prompts": {"q": 1}}), "prompts has 'q': 1: must"),
    "default unknown": (
        put("config_sentence_transformers.json", {"default_prompt_name": "q"}),
        "default_prompt_name is 'q', which is none of prompts: remove it",
    ),
    "model unknown": (edit("config.json", model_type="nosuch"), "model_type is 'nosuch', which the installed"),
    "own code": (edit("config.json", auto_map={"AutoModel": "x.Y"}), "auto_map names code of its own for AutoModel"),
    "kernels": (edit("config.json", attn_implementation="a/b"), "names code to run"),
    "link": (
        lambda d: ((d / POOLING).unlink(), (d / POOLING).symlink_to("/etc/passwd")),
        "is a link to /etc/passwd, out of the model's directory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_directories(model: Path, name: str) -> None:
    change, message = WRONG[name]
    change(model)
    faults = faults_of(model)
    assert message in faults
    assert str(model) in faults


def test_pooling_is_not_guessed(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    assert "set pooling to one of cls, mean, max, mean_sqrt_len, weightedmean, lasttoken" in faults_of(tmp_path)
    recipe = check(EngineSpec("m", "embedding", str(tmp_path), options={"pooling": "cls"})).recipe
    assert (recipe.pooling, recipe.layers) == (("cls",), ("normalize",))
    assert "pooling of engine embedding is 'middle': it must be one of" in faults_of(tmp_path, pooling="middle")


def test_the_key_comes_before_the_directory(model: Path) -> None:
    assert check(EngineSpec("m", "embedding", str(model), options={"pooling": "max"})).recipe.pooling == ("max",)


def test_rerankers(tmp_path: Path) -> None:
    classifier = write(tmp_path / "classifier", "bert", "ForSequenceClassification", num_labels=3)
    assert "config.json: the model has 3 labels: rerank needs a model with one (id2label)" in faults_of(classifier)
    one = write(tmp_path / "one", "bert", "ForSequenceClassification", num_labels=1)
    assert check(EngineSpec("m", "embedding", str(one))).recipe.task == "rerank"
    assert f"task is embed, and {one} is a model for rerank: remove it" in faults_of(one, task="embed")
    edit("config.json", sbert_ce_default_activation_function="os.system")(one)
    assert "config.json: activation_fn is 'os.system': known are Identity" in faults_of(one)
    bare = write(tmp_path / "bare", "bert")
    assert "BertModel gives no scores: rerank needs" in faults_of(bare, task="rerank")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("2_Dense/config.json", in_features=31), "in_features is 31 and out_features 8, and the layer gets"),
        (
            edit("2_Dense/config.json", out_features=9),
            "linear.weight is [8, 32], config.json beside it describes [9, 32]",
        ),
        (edit("2_Dense/config.json", bias=True), "linear.bias is missing"),
        (edit("2_Dense/config.json", activation_function="os.system"), "activation_function is 'os.system': known are"),
        (edit("2_Dense/config.json", use_residual=True), "use_residual is True, which is not supported"),
        (lambda d: (d / "2_Dense/model.safetensors").unlink(), "is missing: pickled weights (*.bin) are never loaded"),
        (put("2_Dense/model.safetensors", "x" * 40), "is no readable safetensors file"),
    ],
)
def test_dense_layers(model: Path, change: Change, message: str) -> None:
    import torch
    from safetensors.torch import save_file

    (model / "2_Dense").mkdir()
    module(2, type="sentence_transformers.models.Dense", path="2_Dense")(model)
    put("2_Dense/config.json", {"in_features": 32, "out_features": 8, "bias": False})(model)
    save_file({"linear.weight": torch.zeros(8, 32)}, model / "2_Dense" / "model.safetensors")
    assert check(EngineSpec("m", "embedding", str(model))).recipe.size == 8
    change(model)
    assert message in faults_of(model)


def test_lengths(model: Path) -> None:
    assert check(EngineSpec("m", "embedding", str(model))).recipe.most_tokens == 64
    with pytest.raises(LoadError, match="max_seq_len is 65, but the model has 64 positions: set at most that"):
        check(EngineSpec("m", "embedding", str(model), max_seq_len=65))
    xlm = describe(write(model / "xlm", "xlm-r"))
    (xlm / "tokenizer_config.json").write_text("{}")
    assert check(EngineSpec("m", "embedding", str(xlm))).recipe.most_tokens == 64  # two of 66 are for padding
