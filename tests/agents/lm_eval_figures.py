"""The program lm-eval computes the same figures of a demo model over HTTP as with transformers itself.

``make test-agents`` runs this file. ``make test`` does not, because the program is downloaded. The tasks are of the
kinds of MMLU and HellaSwag (the likeliest of some endings), of WikiText (perplexity of whole texts), and of generated
answers. No data set can be fetched, so they are made here.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.agents.harness import environment
from tests.gateway.running import Gateway
from tests.serving import Serving
from tools.demo_models import directory

WITHIN_S = 300
TEXT = """\
red fox called Mia lived in a quiet forest and the small bird sang near the river every morning while an old bear
slept under tall trees"""
WORDS = TEXT.split()
TASKS: dict[str, dict[str, Any]] = {
    "endings": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}\nAnswer:", "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    draw = random.Random(1)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    data: dict[str, list[dict[str, Any]]] = {
        "endings": [
            {
                "question": f"Once upon a time there was {text(draw.randrange(3, 60))}.",
                "choices": [text(draw.randrange(1, 5)) for _ in range(4)],
                "answer": draw.randrange(4),
            }
            for _ in range(30)
        ],
        "texts": [{"text": f"Once upon a time there was a red fox. {text(words)}"} for words in (5, 50, 300, 900)],
        "answers": [{"question": f"Once upon a time there was a {text(n)}", "answer": ""} for n in range(1, 6)],
    }
    for name, task in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in data[name]))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **files, **task}))


def run(folder: Path, name: str, *arguments: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Run the program. Return its figures, and by task what it got for each document."""
    variables = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [
            str(environment("lmeval.txt") / "bin" / "lm_eval"), *arguments, "--include_path", str(folder),
            "--tasks", ",".join(TASKS), "--output_path", str(folder / name), "--log_samples",
        ],
        env=variables, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (figures,) = (folder / name).glob("**/results_*.json")
    samples = {}
    for task in TASKS:
        (file,) = (folder / name).glob(f"**/samples_{task}_*.jsonl")
        found = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda each: each["doc_id"])
        samples[task] = [each["resps"] for each in found]
    return json.loads(figures.read_text())["results"], samples


def test_the_figures_are_those_of_transformers(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    model = directory("stories")
    local = f"pretrained={model},dtype=float32,max_length=2047"
    figures, samples = run(tmp_path, "local", "--model", "hf", "--model_args", local, "--device", "cpu")
    served = {"stories": {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu", "max_batch_size": 8}}
    with Serving(served) as serving, Gateway(serving) as gateway:
        reached = f"model=stories,base_url={gateway.url}/completions,tokenizer={model},tokenizer_backend=huggingface"
        for name, more, batch in (("ids", "", 4), ("text", ",tokenized_requests=False,num_concurrent=4", 1)):
            arguments = f"{reached},max_length=2048,max_retries=1{more}"
            over_http, got = run(
                tmp_path, name, "--model", "local-completions", "--model_args", arguments, "--batch_size", str(batch)
            )
            assert got["answers"] == samples["answers"]
            for task in ("endings", "texts"):
                for mine, other in zip(got[task], samples[task], strict=True):
                    check_sums(mine, other)
            for task, values in figures.items():
                for metric, value in values.items():
                    if isinstance(value, float):
                        assert over_http[task][metric] == pytest.approx(value, rel=1e-5), (name, task, metric)
        serving.wait_idle("stories")


def check_sums(mine: list[Any], other: list[Any]) -> None:
    """Compare the sums of log-probabilities for a document, and whether its endings are greedy."""
    for (got,), (expected,) in zip(mine, other, strict=True):
        sums = [each[0] if isinstance(each, list) else each for each in (got, expected)]
        assert float(sums[0]) == pytest.approx(float(sums[1]), rel=1e-5, abs=1e-4)
        assert got[1:] == expected[1:] if isinstance(got, list) else True
