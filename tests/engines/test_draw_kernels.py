"""The kernels draw the tokens that the reference draws, bit for bit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.request import SamplingParams

ROOT = Path(__file__).parents[2]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "smoothing_factor": 0.3},
    {"top_k": 40},
    {"top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.05},
    {"top_a": 0.2},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.95, "top_a": 0.01, "min_p": 0.001},
]


def on_the_gpu() -> Any:
    """Return the module of the cases. It imports Triton, which must not happen where the tests run on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    return importlib.import_module("tests.engines.draw_cases")


def test_the_interpreter_draws_what_the_reference_draws() -> None:
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.draw_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all equal"


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "draws"), [(512, 1_000_000), (128_256, 1000)])
@pytest.mark.parametrize("fields", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 32, 128])
def test_the_gpu_draws_what_the_reference_draws(rows: int, fields: dict[str, Any], vocab: int, draws: int) -> None:
    cases = on_the_gpu()
    seed = cases.seed()
    print(f"TEST_SEED={seed}")
    cases.many_draws(np.random.default_rng(seed), rows, vocab, SamplingParams(**fields), draws, "cuda")


@pytest.mark.gpu
def test_penalties_biases_and_limits_on_the_gpu() -> None:
    cases = on_the_gpu()
    seed = cases.seed()
    print(f"TEST_SEED={seed}")
    for number in range(seed, seed + 20):
        cases.answers(number, 96 if number % 2 else 5000, 8, 6, "cuda", room=16)
    cases.answers(seed, 128_256, 32, 4, "cuda")


@pytest.mark.gpu
def test_odd_rows_on_the_gpu() -> None:
    on_the_gpu().odd_rows("cuda")


@pytest.mark.gpu
def test_log_probabilities_on_the_gpu() -> None:
    cases = on_the_gpu()
    seed = cases.seed()
    print(f"TEST_SEED={seed}")
    cases.log_probabilities(np.random.default_rng(seed), 32, 128_256, "cuda")
