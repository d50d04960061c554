"""An answer to a conversation ends at the special token that the chat template writes behind the assistant's words."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from model_worker.engines import build_engine
from model_worker.intake import Intake
from protocol.codec import pack_body
from protocol.process.worker_spec import EngineSpec
from tests.chat import format_of
from tests.engines.random_model import write_model

TURN = "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content }}END\n{% endfor %}"


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("<|end|>", ["<|end|>"]),
        (" \n<|end|><|role|>", ["<|end|>"]),
        ("", ["<|role|>"]),  # behind the last words there is no token, and before the user's words there is one
        ("</s>", []),  # the engine knows it
        (" Goodbye. <|end|>", []),  # text that the model may write
    ],
)
def test_the_end_of_a_turn(tmp_path: Path, end: str, found: list[str]) -> None:
    write_model(tmp_path, vocab_size=1024)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|end|>", "<|role|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = TURN.replace("END", end)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    engine = build_engine(EngineSpec("m", "transformers", str(tmp_path)))
    engine.load(lambda *_: None)
    assert engine.chat_template is not None
    intake = Intake(engine, {}, {}, format_of(engine.chat_template))
    ids = tuple(tokenizer.token_to_id(name) for name in found)
    assert intake.end_tokens == " ".join(["</s>", *found])
    request = intake.parse(pack_body({"messages": [{"role": "user", "content": "hi"}]}), resumed=False)
    assert intake.job(1, request, (), rendered="hi").stop_token_ids == ids
    request = intake.parse(pack_body({"prompt": "hi", "stop_token_ids": [7]}), resumed=False)
    assert intake.job(1, request, ()).stop_token_ids == (7,)
