"""Result files share one schema, and the models for benchmarks have the described properties."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import load_file

from benchmarks import gptq, models, report
from benchmarks.comparison import compare, first_difference, gap
from benchmarks.harness import Run
from model_worker.engines.exllamav2.check import check_directory
from model_worker.engines.exllamav2.vram import estimate, weight_bytes
from model_worker.engines.model_dir import ModelDir, read_shape
from protocol.client.answers import Completion, TokenLogprob
from protocol.process.worker_spec import EngineSpec
from tools.demo_models import corpus
from tools.demo_models.check import measure_directory

FILES = sorted(report.RESULTS.glob("*.json"))


def test_there_are_result_files() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_result_file_follows_the_schema(path: Path) -> None:
    report.check(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"machine": "m", "commit": "c", "command": "x", "date": "2026-01-01", "results": []},
        {"machine": "m", "commit": "c", "command": "x", "date": "no date", "results": [{}]},
        {
            "machine": "m",
            "commit": "c",
            "command": "x",
            "date": "2026-01-01",
            "results": [{"name": "n", "value": 1.0, "unit": "s", "target": "<= 0.5", "meets": True}],
        },
    ],
)
def test_a_broken_result_file_is_refused(broken: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        report.check(broken)


def test_a_miss_is_shown_as_a_miss() -> None:
    assert report.Result("n", 1.0, "s", "<= 0.5").meets is False
    assert report.Result("n", 0.5, "s", "<= 0.5").meets is True
    assert report.Result("n", 0.5, "s").meets is None


def test_gaps_and_bursts_are_of_the_time_when_all_streams_run() -> None:
    early = [(0.1 * i, 1) for i in range(1, 101)]
    late = [(5 + 0.1 * i, 1) for i in range(1, 101)]
    even = Run([early, late])
    assert even.gaps() == pytest.approx([0.1] * len(even.gaps()))
    assert even.last_tenth() == pytest.approx(1.0)
    assert even.rate == pytest.approx(200 / 15)
    # the last fifth of the tokens comes at once
    burst = Run([[*early[:80], *((8.01, 1) for _ in range(20))]])
    assert burst.last_tenth() > 10
    assert Run([[*early[:80], (8.1, 20)]]).last_delta() == 20


@pytest.mark.parametrize("size", [300, 2048])
def test_a_tokenizer_of_random_models_has_a_text_for_every_id(tmp_path: Path, size: int) -> None:
    models.write_tokenizer(tmp_path, size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    words = [tokenizer.decode([i]) for i in range(258, size)]
    assert len(set(words)) == len(words)
    assert tokenizer.decode(tokenizer.encode("some words, or none").ids) == "some words, or none"


# GPTQ models


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["letters-gptq", "letters-gptq-act-order"])
def made(request: pytest.FixtureRequest, kept: Path) -> Path:
    return models.path_of(request.param, kept)


def unpacked(tensors: dict[str, np.ndarray[Any, Any]], stem: str) -> np.ndarray[Any, Any]:
    """Unpack a weight [out, in] bit by bit, as the format is specified."""
    words, zeros = (tensors[f"{stem}.{part}"].view(np.uint32) for part in ("qweight", "qzeros"))
    scales, groups = tensors[f"{stem}.scales"], tensors[f"{stem}.g_idx"]
    weight = np.zeros((words.shape[1], 8 * words.shape[0]), np.float16)
    out = np.arange(words.shape[1])
    for i, group in enumerate(groups):
        level = words[i // 8] >> np.uint32(4 * (i % 8)) & np.uint32(15)
        zero = (zeros[group, out // 8] >> (4 * (out % 8)).astype(np.uint32) & np.uint32(15)) + 1
        weight[:, i] = scales[group] * (level.astype(np.float16) - zero.astype(np.float16))
    return weight


def test_what_is_packed_is_what_the_twin_has(made: Path) -> None:
    """The unpacked weights are near the original: within half a step, or one step if a symmetric group clips at 7."""
    packed = load_file(made / "model.safetensors")
    twin = load_file(made.with_name(f"{made.name}-dequantised") / "model.safetensors")
    original = load_file(models.path_of("letters") / "model.safetensors")
    assert twin.keys() == original.keys()
    stems = [name.removesuffix(".qweight") for name in packed if name.endswith(".qweight")]
    assert len(stems) == 7 * 4
    for name, weight in twin.items():
        stem = name.removesuffix(".weight")
        if stem not in stems:
            assert np.array_equal(weight, packed[name])
            assert np.array_equal(weight, original[name])
            continue
        assert np.array_equal(unpacked(packed, stem), weight), name
        steps = packed[f"{stem}.scales"][packed[f"{stem}.g_idx"]].T.astype(np.float32)
        off = np.abs(weight.astype(np.float32) - original[name].astype(np.float32)) / steps
        assert off.max() < (0.51 if "act-order" in made.name else 1.01), name
        assert off.mean() < 0.27, name


def test_the_order_of_groups_is_that_of_the_scheme(made: Path) -> None:
    for name, groups in load_file(made / "model.safetensors").items():
        if name.endswith(".g_idx"):
            ascending = np.arange(len(groups)) // 128
            assert np.array_equal(np.sort(groups), ascending)
            assert np.array_equal(groups, ascending) is ("act-order" not in made.name)
    asked = json.loads((made / "config.json").read_text())["quantization_config"]
    beside = json.loads((made / "quantize_config.json").read_text())
    assert asked == {"quant_method": "gptq"} | beside
    assert (asked["bits"], asked["group_size"], asked["checkpoint_format"]) == (4, 128, "gptq")
    assert asked["desc_act"] is ("act-order" in made.name)


def test_a_gptq_model_is_taken_and_its_bytes_are_counted(made: Path) -> None:
    directory = ModelDir(str(made))
    assert directory.quantization == "gptq"
    check_directory(directory)
    assert read_shape(directory) == read_shape(ModelDir(str(models.path_of("letters"))))
    on_gpu = 0
    for name, tensor in load_file(made / "model.safetensors").items():
        sizes = [tensor.nbytes]
        if name.endswith(".g_idx"):
            sizes += 2 * [2 * tensor.size]  # ext.make_q_matrix adds q_perm and q_invperm, int16
        if "embed_tokens" not in name:
            on_gpu += sum(-(-size // 512) * 512 for size in sizes)
    assert weight_bytes(directory) == on_gpu
    spec = EngineSpec("m", "exllamav2", str(made), "cuda", None, 8, {})
    assert estimate(spec).weights == on_gpu


@pytest.mark.long
@pytest.mark.parametrize("scheme", gptq.SCHEMES)
@pytest.mark.parametrize("name", ["letters", "stories"])
def test_demo_models_answer_in_4_bits_as_in_16(name: str, scheme: str, kept: Path) -> None:
    """Each answer leads by more than a GPU's fp16 rounding, so models_run may require that all answers are exact."""
    twin = models.path_of(f"{name}-{scheme}-dequantised", kept)
    report = measure_directory(name, twin, corpus.TEST_PROMPTS[name])
    assert report.exact == report.cases == len(corpus.TEST_PROMPTS[name])
    assert report.margin >= 3


def test_what_the_kernels_cannot_compute_is_not_made() -> None:
    for shape in ((40, 64), (64, 40)):
        with pytest.raises(ValueError, match="multiples of 32"):
            gptq.round_to_nearest(torch.zeros(shape, dtype=torch.half), gptq.Scheme())


def test_zeros_do_not_wrap_and_empty_groups_stay_zero() -> None:
    """A group with only positive weights would need a zero point of 0, which would be stored as -1."""
    weight = torch.zeros((32, 256), dtype=torch.half)
    weight[:, :128] = torch.linspace(0.5, 1.0, 128).half()
    for scheme in gptq.SCHEMES.values():
        rounded = gptq.round_to_nearest(weight, scheme)
        assert rounded.zeros.min() >= 1
        assert rounded.zeros.max() <= 15
        found = rounded.weight()
        assert torch.allclose(found[:, :128], weight[:, :128], atol=0.08)
        assert not found[:, 128:].any()


def test_names_say_what_a_model_was_made_from(kept: Path) -> None:
    for name in ("letters", "letters-exl2", "letters-gptq", "letters-gptq-act-order", "letters-gptq-dequantised"):
        assert models.source_of(name) == "letters"
    assert models.twin_of("1b-gptq-act-order") == "1b-gptq-act-order-dequantised"
    assert models.twin_of("1b-exl2") is models.twin_of("1b-gptq-dequantised") is None
    for name in ("2b", "tiny-dequantised", "tiny-awq", "2b-gptq"):
        with pytest.raises(KeyError):
            models.path_of(name, kept)
    assert not list(kept.glob("2b*"))


# answers that should be alike


def answer(*chosen: int, **logprobs: float) -> Completion:
    """Return an answer of these ids, with the same likeliest tokens at each step: ``t7=-1.0`` is id 7."""
    top = tuple(TokenLogprob(int(name[1:]), value, b"") for name, value in logprobs.items())
    by_id = {token.token_id: token for token in top}
    steps = tuple(TokenLogprob(i, by_id[i].logprob, b"", top) for i in chosen) if top else ()
    return Completion("", chosen, "length", {}, {}, steps)


def test_the_first_difference_counts_an_early_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == first_difference([1], [1, 2]) == 1
    assert first_difference([], []) is None


def test_gaps_tell_a_close_choice_from_another_model() -> None:
    same = answer(7, 8, t7=-1.0, t8=-1.1)
    assert gap(same, same) == 0
    assert gap(same, answer(8, t7=-1.05, t8=-1.0)) == pytest.approx(0.1)
    assert gap(same, answer(5, t5=-0.5, t6=-4.0)) == pytest.approx(3.0), "7 is at most as likely there as 6"
    results = compare("m", "its twin's", [same, same], [same, answer(5, t5=-0.5, t6=-4.0)], must_equal=True)
    assert [(r.value, r.unit, r.meets) for r in results] == [
        (1, "of 2", False),
        (0, "tokens", None),
        (pytest.approx(3.0), "nats", False),
    ]
    assert [r.meets for r in compare("m", "its twin's", [answer(1)], [answer(1)], must_equal=True)] == [True]
