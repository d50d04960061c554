"""The stand-in for the CPU computes as the package's own sampling code, which these tests compile. Other tests show the
faults of that code."""

import ctypes
import platform
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.engines.exllamav2.sampling import LONGEST, MOST_SORTED, cut, is_cut, kept, penalize
from protocol.request import SamplingParams
from tests.engines.exllamav2_cpu import extension
from tests.engines.exllamav2_cpu.package import import_package

HERE = Path(__file__).parent / "exllamav2_cpu"
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 0.0, "tfs": 0.0, "typical": 0.0, "random": 0.5, "post_temperature": 1.0,
    "min_temp": 0.0, "max_temp": 0.0, "temp_exponent": 1.0, "smoothing_factor": 0.0, "skew": 0.0, "mirostat": 0,
    "mu": 0.0,
}  # fmt: skip
TAU, ETA = 1.5, 0.1


class Kernels:
    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def draw(self, logits: np.ndarray[Any, Any], **options: Any) -> tuple[int, np.ndarray[Any, Any], float]:
        """Draw a token. Return (token, probabilities by id, mirostat's mu)."""
        o = NEUTRAL | options
        mu, out = np.array([o["mu"]], np.float32), np.zeros(len(logits), np.float32)
        names = ("top_p", "tfs", "typical", "random", "post_temperature", "min_temp", "max_temp", "temp_exponent",
                 "smoothing_factor", "skew")  # fmt: skip
        token = self._library.draw(
            len(logits), _pointer(logits), ctypes.c_float(o["temperature"]), o["top_k"],
            *(ctypes.c_float(o[name]) for name in names), o["mirostat"], _pointer(mu), ctypes.c_float(TAU),
            ctypes.c_float(ETA), _pointer(out),
        )  # fmt: skip
        return token, out, float(mu[0])

    def penalize(self, logits: np.ndarray[Any, Any], ids: list[int], penalty: float, sustain: int, decay: int) -> None:
        sequence = np.array(ids, np.uint64)
        self._library.penalize(
            len(logits), _pointer(sequence), ctypes.c_float(penalty), sustain, decay, len(ids), _pointer(logits)
        )


def _pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    sources = Path(import_package().__file__).parent / "exllamav2_ext"
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86-64, to compile the package's sampling.cpp")
    library = tmp_path_factory.mktemp("kernels") / "sampling.so"
    files = [sources / "cpp" / f"{name}.cpp" for name in ("sampling", "sampling_avx2", "profiling")]
    command = ["g++", "-O1", "-mavx2", "-w", "-shared", "-fPIC", f"-I{sources}", f"-I{sources / 'cpp'}"]
    subprocess.run([*command, HERE / "kernels.cpp", *files, "-o", library], check=True)
    return Kernels(library)


def some_logits(seed: int, vocab: int) -> np.ndarray[Any, Any]:
    scale = random.Random(seed).choice([0.5, 2.0, 5.0])
    return np.random.default_rng(seed).normal(0, scale, vocab).astype(np.float32)


@pytest.mark.long
def test_the_packages_top_p_drops_likely_tokens(kernels: Kernels) -> None:
    """The engine uses exllamav2.cut instead. If this test fails, the package has been corrected."""
    shares = [0.55, 0.25, 0.1, 0.05, 0.03, 0.02]
    logits = np.log(np.array(shares + [1e-9] * 58, np.float32))
    _, probs, _ = kernels.draw(logits, top_p=0.7)
    assert probs[1] == 0
    assert np.flatnonzero(probs).tolist() == [0, 2, 3]
    assert kept(logits, SamplingParams(top_p=0.7)) == 2


@pytest.mark.long
def test_the_stand_in_draws_as_the_kernels_do(kernels: Kernels) -> None:
    meta, different = torch.empty((1, 1), device="meta"), 0
    for seed in range(600):
        rng = random.Random(seed)
        logits = some_logits(seed, rng.choice([64, 448]))
        o = NEUTRAL | {
            "temperature": rng.choice([1.0, 0.7, 2.5]), "top_k": rng.choice([0, 0, 1, 5, 40]),
            "tfs": rng.choice([0.0, 0.9]), "typical": rng.choice([0.0, 0.8]), "random": rng.random(),
            "post_temperature": rng.choice([1.0, 0.8]), "max_temp": rng.choice([0.0, 1.5]),
            "smoothing_factor": rng.choice([0.0, 0.5]), "skew": rng.choice([0.0, -0.7]), "mirostat": rng.choice([0, 1]),
            "mu": rng.choice([0.0, 3.0]),
        }  # fmt: skip
        token, probs, mu = kernels.draw(logits, **o)
        size = len(logits)
        drawn, prob = torch.empty((1, 1), dtype=torch.long), torch.empty((1, 1))
        values, ids = torch.zeros((1, 1, size)), torch.zeros((1, 1, size), dtype=torch.long)
        mus = extension.sample_basic(
            torch.from_numpy(logits)[None, None], o["temperature"], o["top_k"], 0.0, 0.0, 0.0, o["tfs"], o["typical"],
            o["random"], drawn, prob, values, ids, meta, bool(o["mirostat"]), [o["mu"]], TAU, ETA,
            o["post_temperature"], meta, 0.0, 0.1, o["min_temp"], o["max_temp"], o["temp_exponent"],
            o["smoothing_factor"], o["skew"],
        )  # fmt: skip
        ours = np.zeros(size, np.float32)
        ours[ids[0, 0].numpy()] = values[0, 0].numpy()
        if np.abs(ours - probs).max() > 1e-3:
            different += 1  # two tokens are equally far from typical
        elif o["mirostat"] and int(drawn) == token:
            assert mus[0] == pytest.approx(mu, abs=1e-3)
    assert different <= 2, f"{different} of 600 distributions"


def test_the_stand_in_penalizes_as_the_kernel_does(kernels: Kernels) -> None:
    for seed in range(200):
        rng, logits = random.Random(seed), some_logits(seed, 96)
        ids = [rng.randrange(110) for _ in range(rng.randrange(1, 200))]
        options = (rng.choice([1.1, 2.0, 0.8]), rng.choice([-1, 0, 10, 100]), rng.choice([0, 20]))
        ours = torch.from_numpy(logits.copy())[None, None]
        extension.apply_rep_penalty(torch.tensor([ids]), *options, 0.0, 0.0, ours)
        kernels.penalize(logits, ids, *options)
        assert np.allclose(ours[0, 0].numpy(), logits, atol=1e-4)


# the engine's replacements


def by_definition(logits: np.ndarray[Any, Any], s: SamplingParams) -> set[int]:
    """Return the ids that remain after each filter, one after the other on a normalized distribution."""
    x = logits.astype(np.float64) - float(logits.max())
    x = (-(x**2) * s.smoothing_factor if s.smoothing_factor else x) / (1.0 if s.temperature_last else s.temperature)
    ids = np.argsort(-x, kind="stable")
    probs = np.exp(x[ids]) / np.exp(x).sum()

    def keep(size: int) -> None:
        nonlocal ids, probs
        ids, probs = ids[: max(size, 1)], probs[: max(size, 1)] / probs[: max(size, 1)].sum()

    if s.top_k:
        keep(s.top_k)
    if s.top_p < 1:
        keep(next((n for n in range(1, len(probs)) if probs[:n].sum() >= s.top_p), len(probs)))
    if s.top_a:
        keep(int((probs >= s.top_a * probs[0] ** 2).sum()))
    if s.min_p:
        keep(int((probs >= s.min_p * probs[0]).sum()))
    return set(ids.tolist())


def test_what_remains_is_what_the_definitions_say() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        sampling = SamplingParams.made(
            temperature=rng.choice([1.0, 0.5, 3.0]), top_k=rng.choice([0, 0, 3, 50, 10_000]),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.3, 1e-6]), top_a=rng.choice([0.0, 0.0, 0.2, 1.0]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1e-9, 0.99]), smoothing_factor=rng.choice([0.0, 0.0, 0.3]),
            temperature_last=rng.random() < 0.2,
        )  # fmt: skip
        logits = some_logits(seed, rng.choice([7, 64, 2000]))
        count, expected = kept(logits.copy(), sampling), by_definition(logits, sampling)
        assert abs(count - len(expected)) <= (1 if len(logits) == 2000 else 0), f"seed {seed}"  # rounding, at the edge


def test_excluded_tokens_and_infinities() -> None:
    logits = np.array([1.0, -np.inf, 0.5, -np.inf], np.float32)
    assert kept(logits, SamplingParams(top_p=0.999999)) == 2
    assert kept(np.array([1.0, np.inf, 2.0], np.float32), SamplingParams(min_p=0.1)) == 1
    assert cut(np.array([1.0, np.inf, 2.0], np.float32), SamplingParams(typical_p=0.5)) == 1
    with pytest.raises(RuntimeError, match="not numbers"):
        kept(np.array([1.0, np.nan], np.float32), SamplingParams(min_p=0.1))
    assert not is_cut(SamplingParams(top_k=40))
    assert not is_cut(SamplingParams(temperature=0, top_p=0.5))
    assert is_cut(SamplingParams(min_p=0.1))


@pytest.mark.parametrize("equal", [False, True])
def test_many_tokens_are_left_without_sorting(equal: bool) -> None:
    logits = np.random.default_rng(3).normal(size=4000).astype(np.float32)
    if equal:
        logits = np.round(logits)
    for count in (500, 501, 2500, 3999, 4000, 5000):
        left = logits.copy()
        top_k = cut(left, SamplingParams(top_k=count))
        assert top_k == (count if count == MOST_SORTED else 0)
        if top_k == 0:
            expected = np.lexsort((-np.arange(4000), -logits))[:count]
            assert sorted(np.flatnonzero(left > -np.inf)) == sorted(expected), "the likeliest, equal ones by their ids"
            assert (left[expected] == logits[expected]).all()


def test_tfs_keeps_as_many_as_the_package(kernels: Kernels) -> None:
    for seed in range(100):
        logits, share = some_logits(seed, 400), random.Random(seed).choice([0.5, 0.9, 0.99])
        _, probs, _ = kernels.draw(logits, tfs=share)
        count = cut(logits.copy(), SamplingParams(tfs=share))
        assert abs(count - int((probs > 0).sum())) <= 1, f"seed {seed}"


# DRY


def dry_by_definition(ids: list[int], s: SamplingParams, breakers: set[int]) -> dict[int, int]:
    """Return, for each token, the length of the longest repeated sequence that the token would continue."""
    ids = ids[-s.dry_range :] if s.dry_range else ids
    found: dict[int, int] = {}
    for end in range(len(ids) - 1):
        length = 0
        while length <= end and ids[end - length] == ids[-1 - length] not in breakers:
            length += 1
        if length >= s.dry_allowed_length and ids[end + 1] not in breakers:
            found[ids[end + 1]] = max(found.get(ids[end + 1], 0), min(length, LONGEST))
    return found


def test_dry_is_what_its_definition_says() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ids = [rng.randrange(rng.choice([3, 8])) for _ in range(rng.randrange(1, 120))]
        if rng.random() < 0.3:
            ids += ids  # a repeat longer than any that counts
        breakers = {rng.randrange(10) for _ in range(rng.randrange(2))}
        sampling = SamplingParams.made(
            dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=rng.choice([1, 2, 5]), dry_range=rng.choice([0, 30])
        )
        logits = np.zeros(10, np.float32)
        penalize(logits, np.array(ids), sampling, np.isin(np.arange(10), list(breakers)))
        expected = dry_by_definition(ids, sampling, breakers)
        for token in range(10):
            length = expected.get(token)
            lost = 0.0 if length is None else 0.8 * 1.5 ** (length - sampling.dry_allowed_length)
            assert logits[token] == pytest.approx(-lost, rel=1e-5), f"seed {seed}"


def test_dry_over_a_long_prompt_does_not_stall_a_step() -> None:
    """The package's own DRY takes four seconds for this prompt."""
    ids = np.random.default_rng(0).integers(3, 400, 32_000)
    logits = np.zeros(448, np.float32)
    before = time.process_time()
    for _ in range(10):
        penalize(logits, ids, SamplingParams(dry_multiplier=0.8), np.zeros(448, bool))
    assert time.process_time() - before < 0.5
