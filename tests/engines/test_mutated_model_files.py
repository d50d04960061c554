"""A model with random values anywhere in its JSON files either loads or is refused with a LoadError. Another exception
would count as a fault of the engine, and the worker would be started again and again."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.embedding.directory import check, needs
from model_worker.engines.exllamav2.vram import estimate
from model_worker.engines.model_dir import ModelDir, read_shape
from model_worker.engines.tokenizer import Tokenizer
from model_worker.engines.vetting import understood
from protocol.process.worker_spec import EngineSpec
from tests.engines.hostile_directories import DEMO
from tests.engines.tiny_embedding import describe, write

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
MUTATIONS = 300
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**23, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x", "llama3",
    "\0", "../../etc/passwd", "é" * 300, [], [[]], [None], {}, {"a": {}}, {"type": "yarn"}, ["LlamaForCausalLM"] * 2,
    [1e999, "s"],
]  # fmt: skip
MORE: list[tuple[str, Any]] = [
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    ("text_config", {"hidden_size": 8}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    ("layer_types", ["full_attention"]),
    ("sliding_window", 5),
    ("auto_map", {"AutoConfig": "a.B"}),
    ("chat_template", [{"name": "default", "template": "{{ 1 }}"}]),
    ("add_bos_token", True),
    ("weight_map", {"a": "model.safetensors"}),
    ("architectures", ["MixtralForCausalLM"]),
    ("partial_rotary_factor", 0.5),
]


def mutated(value: Any, chance: random.Random) -> Any:
    """Return the value with an odd value in one place."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        return {**value, key: mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], mutated(value[place], chance), *value[place + 1 :]]
    return chance.choice(ODD)


def test_mutated_json(tmp_path: Path) -> None:
    print(f"TEST_SEED={SEED}")
    chance = random.Random(SEED)
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    originals = {name: json.loads((DEMO / name).read_text()) if (DEMO / name).exists() else {} for name in FILES}
    parts: list[str] = []
    for _ in range(MUTATIONS):
        name = chance.choice(FILES[:1] * 5 + FILES)
        value = dict(originals[name])
        for _ in range(chance.randrange(1, 4)):
            if chance.random() < 0.4:
                value.update([chance.choice(MORE)])
            value = mutated(value, chance)
            if not isinstance(value, dict):
                break
        (tmp_path / name).write_text(json.dumps(value))
        for act in (_read, _estimate):
            try:
                with understood(tmp_path):
                    act(str(tmp_path))
            except LoadError as e:
                parts.append(str(e))
        (tmp_path / name).unlink()
        if originals[name]:
            (tmp_path / name).write_text(json.dumps(originals[name]))
    assert MUTATIONS // 4 < len(parts) < 2 * MUTATIONS
    assert len(max(parts, key=len)) < 2000


def test_mutated_files_of_sentence_transformers(tmp_path: Path) -> None:
    print(f"TEST_SEED={SEED}")
    chance = random.Random(SEED)
    describe(write(tmp_path, "bert"), include_prompt=True)
    dense = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.Tanh"}
    originals: dict[str, Any] = {
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "what is "}, "default_prompt_name": "query"},
        "2_Normalize/config.json": dense,
        **{
            name: json.loads((tmp_path / name).read_text())
            for name in ("modules.json", "1_Pooling/config.json", "config.json", "tokenizer_config.json")
        },
    }
    (tmp_path / "2_Normalize").mkdir()
    refused: list[str] = []
    for _ in range(MUTATIONS // 3):
        name = chance.choice(list(originals))
        for each, value in originals.items():
            (tmp_path / each).write_text(json.dumps(mutated(value, chance) if each == name else value))
        try:
            needs(check(EngineSpec("m", "embedding", str(tmp_path), device="cuda")))
        except LoadError as e:
            refused.append(str(e))
    assert MUTATIONS // 12 < len(refused) < MUTATIONS // 3
    assert len(max(refused, key=len)) < 2000


def _read(path: str) -> None:
    directory = ModelDir(path)
    directory.context(None)
    Tokenizer(directory)
    read_shape(directory)


def _estimate(path: str) -> None:
    estimate(EngineSpec("m", "exllamav2", path, device="cuda"))
