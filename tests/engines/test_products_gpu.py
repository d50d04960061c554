"""Products with quantised matrices: right for every layout, and the same bits for a row whatever is computed beside it.

These tests need a CUDA device. Weights are random levels in the layouts that ExLlamaV2's converter makes, and the
reference is x @ W in float64, with the W that the package's ``reconstruct`` gives.
"""

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import exl2, gptq
from benchmarks.models import SHAPES, write_model
from model_worker.engines import build_engine
from model_worker.engines.exllamav2.decode.capture import finish_tuning
from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs, HostEmbedding, StepRow
from model_worker.engines.exllamav2.load import import_package
from model_worker.engines.exllamav2.products import layout
from model_worker.engines.exllamav2.products.modules import OwnModules, Products, _Matrix, _Product
from model_worker.engines.exllamav2.quantised_cache import in_place
from protocol.process.worker_spec import EngineSpec
from tests.engines.conftest import need_gpu

pytestmark = pytest.mark.gpu

ROWS = 1, 5, 8, 9, 16, 17, 31, 33, 64


@pytest.fixture(autouse=True)
def _gpu(products: dict[bool, Products]) -> None:
    """All tests need the package."""


@pytest.fixture(scope="module")
def products() -> dict[bool, Products]:
    need_gpu("exllamav2")
    import_package()  # the package looks for attention when it is imported
    return {True: Products(0, [4], gptq=True), False: Products(0, layout.WIDTHS, gptq=False)}


def levels(seed: int, *size: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda", generator=generator)


def loaded(tensors: dict[str, Any], inputs: int, outputs: int) -> tuple[Any, torch.Tensor]:
    """Return a matrix as the package has it after loading, and its weights fp16 [inputs, outputs]."""
    ext = importlib.import_module("exllamav2.ext")
    scratch, weights = (torch.empty(inputs, outputs, dtype=torch.half, device="cuda") for _ in range(2))
    handle = ext.make_q_matrix(tensors, scratch.view(-1), max_dq_rows=1 << 20)
    ext.exllamav2_ext.reconstruct(handle, weights)
    return SimpleNamespace(q_tensors=tensors, in_features=inputs, device_idx=0), weights


def exl2_matrix(inputs: int, outputs: int, plan: list[tuple[int, int, int]], reordered: bool) -> Any:
    """``plan``: (bits, inputs, inputs of a group)."""
    groups, word = [], 0
    for bits, left, size in plan:
        while left:
            own = min(size, left)
            groups += [bits, word]
            word, left = word + own * bits // 32, left - own
    count = len(groups) // 2
    tensors = {
        "q_weight": levels(1, word, outputs),
        "q_scale": levels(2, count, outputs // 8),
        "q_scale_max": torch.linspace(0.2, 1.0, count, device="cuda").half(),
        "q_groups": torch.tensor(groups, dtype=torch.int16, device="cuda"),
    }
    if reordered:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)).cuda()
        tensors |= {"q_perm": order.int(), "q_invperm": order.argsort().int()}
    return loaded(tensors, inputs, outputs)


def gptq_matrix(inputs: int, outputs: int, groups: int, reordered: bool) -> Any:
    size = 1
    while size * groups < inputs:
        size *= 2
    of_group = torch.arange(inputs) // size
    if reordered:
        of_group = of_group[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    scales = torch.rand(groups, outputs, device="cuda", generator=torch.Generator(device="cuda").manual_seed(4))
    return loaded(
        {
            "qweight": levels(1, inputs // 8, outputs), "qzeros": levels(2, groups, outputs // 8),
            "scales": (scales * 0.01).half(), "g_idx": of_group.int(),
        }, inputs, outputs,
    )  # fmt: skip


def check(products: Products, linear: Any, weights: torch.Tensor) -> None:
    matrix = _Matrix(linear)
    product, placed = _Product(products, [matrix], "store"), products.placed("test", matrix.inputs)
    x = torch.randn(64, matrix.inputs, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5)).half()
    first = None
    for rows in ROWS:
        out = torch.empty(rows, matrix.outputs, dtype=torch.half, device="cuda")
        products.place(x[:rows].contiguous(), product.perm, placed)
        product(placed, [out], rows)
        wanted = x[:rows].double() @ weights.double()
        bound = wanted.abs() * 2**-11 + (x[:rows].double().abs() @ weights.double().abs()) * 2**-18
        assert ((out.double() - wanted).abs() <= bound).all(), f"{rows} rows"
        first = out[0] if first is None else first
        assert torch.equal(first, out[0]), f"row 0 differs beside {rows - 1} others"
    # A row keeps its bits at every place, beside rows that are no numbers.
    others = torch.full_like(x, float("nan"))
    for place in (0, 7, 8, 33, 63):
        beside = others.clone()
        beside[place] = x[0]
        out = torch.empty(64, matrix.outputs, dtype=torch.half, device="cuda")
        products.place(beside, product.perm, placed)
        product(placed, [out], 64)
        assert torch.equal(first, out[place]), f"row {place} differs"
    assert not products._counters.any()


@pytest.mark.parametrize("reordered", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "plan"),
    [
        (4096, 256, [(4, 4096, 128)]),
        (576, 192, [(8, 32, 32), (4, 128, 128), (3, 416, 128)]),
        (896, 64, [(6, 96, 32), (5, 800, 32)]),
        (1536, 576, [(6, 96, 32), (3, 320, 64), (2, 1120, 64)]),
        (1024, 4608, [(8, 96, 32), (6, 160, 32), (5, 96, 32), (4, 320, 64), (3, 256, 64), (2, 96, 32)]),
        (3584, 512, [(8, 192, 128), (4, 384, 128), (3, 3008, 128)]),
        (5120, 128, [(6, 640, 128), (5, 4480, 128)]),
        (96, 128, [(2, 96, 32)]),
        (18944, 256, [(5, 960, 128), (3, 17984, 128)]),
    ],
)
def test_every_layout_of_exl2(
    products: dict[bool, Products], inputs: int, outputs: int, plan: list[tuple[int, int, int]], reordered: bool
) -> None:
    check(products[False], *exl2_matrix(inputs, outputs, plan, reordered))


@pytest.mark.parametrize("reordered", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"),
    [(4096, 512, 32), (576, 200, 5), (1536, 4608, 12), (18944, 264, 148), (512, 128, 1)],
)
def test_gptq(products: dict[bool, Products], inputs: int, outputs: int, groups: int, reordered: bool) -> None:
    check(products[True], *gptq_matrix(inputs, outputs, groups, reordered))


@pytest.mark.parametrize(
    ("form", "mode"), [("exl2", "FP16"), ("gptq", "FP16"), ("exl2", "Q8"), ("exl2", "Q6"), ("exl2", "Q4")]
)
def test_a_whole_step(tmp_path: Path, form: str, mode: str) -> None:
    """Our products and the package's give the same logits, but for rounding. With ours a row keeps its bits. So it is
    with quantised pages, which our steps read in place, and the package copies."""
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    write_model(plain, SHAPES["tiny"])
    if form == "exl2":
        exl2.write(plain, quantised)
    else:
        gptq.write_both(plain, quantised, tmp_path / "twin", gptq.SCHEMES["gptq"])
    options = {"cache_size": 64 * 1024, "graphs": False, "cache_mode": mode}
    engine: Any = build_engine(EngineSpec("m", "exllamav2", str(quantised), "cuda", 1024, 64, options))
    engine.load(lambda *_: None)
    loaded = engine._loaded
    model, cache = loaded.model, loaded.cache
    finish_tuning(loaded.core, model)  # of the package's kernels: it waits for the GPU, which a capture does not allow
    own = OwnModules(model)
    assert own.complete, own.why
    embedding = HostEmbedding(model.modules[0].embedding.weight.data)
    random_numbers = torch.Generator(device="cuda").manual_seed(6)
    for tensor in cache.key_states + cache.value_states:
        if mode == "FP16":
            tensor.normal_(generator=random_numbers)
        else:
            tensor.random_(0, 256, generator=random_numbers)
    for tensor in () if mode == "FP16" else cache.key_scales + cache.value_scales:
        tensor.fill_(1 / (50 if mode == "Q4" else 800))
    pages, why = in_place(cache, model.config.num_attention_heads, 1)
    assert not why
    draw = random.Random(7)
    step = [
        StepRow([draw.randrange(200)], draw.randrange(1, 1000), np.arange(4 * row, 4 * row + 4, dtype=np.int32))
        for row in range(63)
    ]
    counts = [1, 2, 3, 4, 8, 16, 24, 32, 40, 63]
    logits = {}
    for name, modules, used in (("package", None, cache), ("own", own, pages or cache)):
        graphs = DecodeGraphs(
            model, used, None, embedding, rows=counts, widths=[4], queries=1, spare=255, own=modules
        )  # fmt: skip
        graphs.capture(lambda *_: None)
        for count in counts:
            logits[name, count] = graphs.replay(step[:count]).float().clone()
        torch.cuda.synchronize()
    for count in counts:
        package, ours = logits["package", count], logits["own", count]
        assert (ours - package).norm() < 0.05 * package.norm(), count
        assert torch.equal(ours, logits["own", 63][:count]), count
