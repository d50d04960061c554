"""TabbyAPI's file in a model's directory gives defaults, and never keeps a model from being served."""

from pathlib import Path

import pytest

from supervisor.config.file import Examined, examine_config
from supervisor.config.foreign import NAME

MODEL = """\
max_seq_len: 8192
cache_size: 16384
cache_mode: Q6
chunk_size: 1024
max_batch_size: 6
rope_scale: 2.0
"""
BELOW = "model:\n" + "".join(f"  {line}\n" for line in MODEL.splitlines())


def examined(tmp_path: Path, tabby: str, keys: str = "", **variables: str) -> Examined:
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / NAME).write_text(tabby)
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  a: {{model_dir: m, gpu: 0{keys}}}\n  b: {{model_dir: m, gpu: 1}}\n")
    return examine_config(file, variables)


@pytest.mark.parametrize("text", [MODEL, BELOW], ids=["at the top", "below model"])
def test_its_keys_are_defaults(tmp_path: Path, text: str) -> None:
    found = examined(tmp_path, text, ", cache_mode: Q8", MODELCTL_MODELS__A__MAX_BATCH_SIZE="3")
    assert (found.problems, found.config.notes) == ([], [])
    a, b = found.config.models["a"].config, found.config.models["b"].config
    assert (a.cache_mode, a.max_batch_size, a.chunk_size) == ("Q8", 3, 1024), "models.yaml and the environment win"
    assert (b.max_seq_len, b.cache_size, b.cache_mode, b.max_batch_size, b.rope_scale) == (8192, 16384, "Q6", 6, 2.0)
    place, line = found.source.origin(("models", "b", "chunk_size")) or ("", 0)
    assert (Path(place).name, line) == (NAME, 4 if text == MODEL else 5)


def test_a_draft_model_lies_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    text = "draft_model:\n  draft_model_name: small\n  draft_cache_mode: Q4\n  draft_num_tokens: 3\n"
    config = examined(tmp_path, text).config.models["a"].config
    assert (config.draft_model, config.draft_cache_mode, config.draft_tokens) == (str(tmp_path / "small"), "Q4", 3)
    found = examined(tmp_path, text.replace("small", "nowhere"))
    assert found.problems == []
    assert found.config.models["a"].config.draft_model is None
    assert f"{NAME}:2: draft_model.draft_model_name: is left out: there is no directory" in found.config.notes[0]


def test_reasoning_and_the_format_of_tools(tmp_path: Path) -> None:
    text = "{reasoning: true, reasoning_start_token: <r>, reasoning_end_token: </r>, tool_format: hermes}"
    config = examined(tmp_path, f"model: {text}").config.models["a"].config
    assert (config.reasoning, config.tool_format) == (("<r>", "</r>"), "hermes")
    assert examined(tmp_path, "model: {reasoning: false}").config.models["a"].config.reasoning is None


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("vision: true", ":1: vision: is left out: modelctl has no such key"),
        ("cache_mode: 8,8", ":1: cache_mode: is left out: cache_mode"),
        ("cache_size: 1000", ":1: cache_size: is left out: cache_size 1000: cache_size is 1000: must be a multiple"),
        ("gpu_split: [20, 22]", ":1: gpu_split: is left out: gpu_split [20, 22]: gpu_split is for several GPUs"),
        ("tool_format: qwen3_5", ":1: tool_format: is left out"),
        ("max_seq_len: many", ":1: max_seq_len: is left out"),
        ("[1, 2]", ":1: is left out: it must be a mapping"),
        ("model: [", "is not YAML"),
        ("a: 1\na: 2", "each name may stand once"),
        ("x: !!python/object/apply:os.system [ls]", "means nothing here"),
        ("y" * ((1 << 20) + 1), "is larger than"),
    ],
)
def test_what_cannot_be_used_is_a_note(tmp_path: Path, text: str, note: str) -> None:
    found = examined(tmp_path, text)
    assert found.problems == []
    assert set(found.config.models) == {"a", "b"}
    assert any(note in line for line in found.config.notes), found.config.notes


def test_values_that_leave_it_to_tabby_say_nothing(tmp_path: Path) -> None:
    text = "max_seq_len: -1\nrope_alpha: auto\ngpu_split: []\ncache_size:\nbackend: exllamav2\nvision: false\n"
    found = examined(tmp_path, text)
    assert (found.problems, found.config.notes) == ([], [])
    assert found.config.models["a"].config.max_seq_len is None


def test_other_engines_do_not_read_it(tmp_path: Path) -> None:
    found = examined(tmp_path, "chunk_size: 512", ", engine: transformers")
    assert found.config.models["a"].config.chunk_size is None
