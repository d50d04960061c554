"""The package's tokenizer that is made from ours is the one that the package reads by itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from model_worker.engines.exllamav2.load import make_tokenizer
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer as OurTokenizer
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.test_token_pieces import byte_level, sentencepiece
from tools.demo_models import directory


def of_sentencepiece(strips: bool) -> Tokenizer:
    tokenizer = sentencepiece(strips)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def of_bytes(*, regular: bool) -> Tokenizer:
    """``regular``: whether " t" is one token, by which the package chooses how it reads the texts of tokens."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if regular:
        tokenizer.add_tokens([AddedToken(" t", normalized=False)])
    return tokenizer


MADE = {
    "bytes": lambda: of_bytes(regular=False),
    "bytes, a token with a space": lambda: of_bytes(regular=True),
    "sentencepiece": lambda: of_sentencepiece(strips=True),
    "sentencepiece, spaces kept": lambda: of_sentencepiece(strips=False),
}


def written(to: Path, name: str) -> ModelDir:
    shutil.copytree(directory("letters"), to, dirs_exist_ok=True)
    if name in MADE:
        MADE[name]().save(str(to / "tokenizer.json"))
        special = {str(token): {"content": f"<|more {token}|>", "special": True} for token in (900, 905)}
        config = {"add_bos_token": False, "added_tokens_decoder": special, "eos_token": "<|more 900|>"}
        (to / "tokenizer_config.json").write_text(json.dumps(config))
        (to / "added_tokens.json").write_text(json.dumps({"<|most|>": 910}))
    elif name != "letters":
        shutil.copytree(directory(name), to, dirs_exist_ok=True)
    return ModelDir(to)


def fields(tokenizer: Any) -> dict[str, Any]:
    own = {"tokenizer_model", "config", "id_to_ord"}
    return {key: value for key, value in vars(tokenizer).items() if key not in own and not key.endswith("_lock")}


@pytest.mark.parametrize("name", [*MADE, "letters", "stories", "agent"])
def test_it_is_what_the_package_reads(name: str, tmp_path: Path) -> None:
    core = import_package()
    read = written(tmp_path / "model", name)
    config = core.ExLlamaV2Config()
    config.model_dir = str(read.path)
    config.prepare()
    expected = core.ExLlamaV2Tokenizer(config)
    expected.get_id_to_piece_list(True)
    made = make_tokenizer(core, config, OurTokenizer(read))
    assert fields(made) == fields(expected)
    assert len(made.id_to_piece_with_special) >= 64, "it would compare nothing"
    for text in ("a é 🦊", "sort: b a ->", "<|special|>"):
        assert made.encode(text).tolist() == expected.encode(text).tolist()
        ids = made.encode(text, encode_special_tokens=True)
        assert made.decode(ids[0]) == expected.decode(ids[0])


def test_a_tokenizer_without_a_table_is_read_by_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = import_package()
    read = written(tmp_path / "model", "letters")
    content = json.loads((read.path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    (read.path / "tokenizer.json").write_text(json.dumps(content))
    ours = OurTokenizer(read)
    assert ours.pieces is None
    config = core.ExLlamaV2Config()
    config.model_dir = str(read.path)
    config.prepare()
    assert (
        fields(make_tokenizer(core, config, ours))["id_to_piece"]
        == core.ExLlamaV2Tokenizer(config).get_id_to_piece_list()
    )
    assert "the decoder is of another kind" in capsys.readouterr().out
