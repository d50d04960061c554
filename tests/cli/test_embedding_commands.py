"""modelctl init and modelctl check know models for vectors and scores."""

from pathlib import Path

import yaml

from tests.cli.programs import modelctl
from tests.engines.tiny_embedding import describe, write


def test_init_recognises_what_makes_vectors_and_scores(tmp_path: Path) -> None:
    root = tmp_path / "models"
    describe(write(root / "minilm", "bert"))
    describe(write(root / "qwen-embedding", "qwen3", "ForCausalLM"), "lasttoken")
    write(root / "reranker", "xlm-r", "ForSequenceClassification", num_labels=1)
    write(root / "chat", "qwen3", "ForCausalLM")
    write(root / "bare", "bert")
    done = modelctl("init", root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    entries = yaml.safe_load((tmp_path / "models.yaml").read_text())["models"]
    assert {name: entry["engine"] for name, entry in entries.items()} == {
        "minilm": "embedding",
        "qwen-embedding": "embedding",
        "reranker": "embedding",
        "chat": "transformers",
    }
    assert entries["minilm"]["gpu"] == "cpu"
    assert "max_seq_len" not in entries["minilm"]
    assert "bare" in done.stderr
    checked = modelctl("check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_check_names_the_key(tmp_path: Path) -> None:
    write(tmp_path / "bare", "bert")
    file = tmp_path / "models.yaml"
    entry = "models:\n  m:\n    model_dir: bare\n    engine: embedding\n"
    for more, message in (
        ("", "set pooling to one of cls, mean, max, mean_sqrt_len, weightedmean, lasttoken"),
        ("    pooling: middle\n", "models.m.pooling: is 'middle'"),
        ("    pooling: mean\n    cache_size: 256\n", "is not a key of engine 'embedding'; remove it"),
        ("    pooling: mean\n    sampling: {temperature: 0}\n", "is for models that write text; remove it"),
        ("    pooling: mean\n    max_batch_size: 16\n", "is for models that write text; remove it"),
        ("    pooling: mean\n    max_seq_len: 65\n", "max_seq_len is 65, but the model has 64 positions"),
    ):
        file.write_text(entry + more)
        done = modelctl("check", file, cwd=tmp_path)
        assert done.returncode == 78
        assert message in done.stdout + done.stderr
    file.write_text(
        entry
        + "    pooling: mean\ndefaults: {sampling: {temperature: 0}, max_batch_size: 4, cache_mode: Q8, lazy: true}\n"
    )
    done = modelctl("check", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
