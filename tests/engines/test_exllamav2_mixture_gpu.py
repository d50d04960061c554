"""ExLlamaV2's fused function for mixtures of experts agrees with its PyTorch code on the same quantized weights.

These tests need a CUDA device. They write models with random weights in the EXL2 and GPTQ formats.

Both ways compute in fp16 and add in different orders. Sometimes a token's eighth and ninth expert are so close that
the two ways choose different ones. In these models that changes a row's logits by up to a quarter of their length.
Missing experts change them by 0.8 or more (computed in fp32 on the CPU, with noise of 0.01 on the routing).
"""

import contextlib
import importlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import exl2, gptq
from benchmarks.models import SHAPES, MixtureShape, write_model
from model_worker.engines import build_engine
from model_worker.engines.exllamav2 import load as mixture
from protocol.process.worker_spec import EngineSpec
from tests.engines.conftest import need_gpu
from tests.engines.driver import Driver

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 4, 5, 8)
STD = 0.3
"""Standard deviation of the weights, so that experts add as much to a token as attention does."""
WRONG = 0.5
"""A relative error that only missing experts cause."""


@pytest.fixture(autouse=True)
def _gpu() -> None:
    need_gpu("exllamav2")


def load(where: Path, form: str, experts: int = 128, **options: Any) -> Any:
    """Load an engine with a mixture of ``experts`` experts in the format ``form``."""
    shape = SHAPES["mixture"]
    assert isinstance(shape, MixtureShape)
    chosen = min(shape.num_experts_per_tok, experts // 2)
    plain, quantized = where / "plain", where / "quantized"
    write_model(plain, replace(shape, num_experts=experts, num_experts_per_tok=chosen), std=STD)
    if form == "exl2":
        exl2.write(plain, quantized)
    else:
        gptq.write_both(plain, quantized, where / "twin", gptq.SCHEMES["gptq"])
    options = {"cache_size": 8 * 512, "chunk_size": 256} | options
    engine = build_engine(EngineSpec("mixture", "exllamav2", str(quantized), "cuda", 512, 8, options))
    engine.load(lambda *_: None)
    return engine


@pytest.fixture(scope="module", params=["exl2", "gptq"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need_gpu("exllamav2")
    loaded = load(tmp_path_factory.mktemp(request.param), request.param)
    yield loaded
    loaded.close()


def layers(engine: Any) -> list[Any]:
    return [module for module in engine._loaded.model.modules if type(module).__name__ == "ExLlamaV2MoEMLP"]


@contextlib.contextmanager
def forward(way: Any) -> Iterator[None]:
    """Compute mixtures with this method of the package's layer inside the context."""
    package = importlib.import_module("exllamav2.moe_mlp")
    with mock.patch.object(package.ExLlamaV2MoEMLP, "forward", way):
        yield


def in_torch() -> contextlib.AbstractContextManager[None]:
    return forward(importlib.import_module("exllamav2.moe_mlp").ExLlamaV2MoEMLP.forward_torch)


def as_packaged() -> contextlib.AbstractContextManager[None]:
    return forward(importlib.import_module("exllamav2.moe_mlp").modelctl_original)


def logits(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [rows, vocabulary] for ids [streams, tokens], with each stream on a page of its own."""
    streams, tokens = ids.shape
    params = importlib.import_module("exllamav2.attn").ExLlamaV2Attention.PagedParams(
        batch_size=streams,
        block_index=torch.arange(streams, dtype=torch.int32)[:, None],
        cache_seqlens=torch.zeros(streams, dtype=torch.int32),
        max_cache_seqlen=0,
        page_size=256,
        q_len=tokens,
    )
    loaded = engine._loaded
    out = loaded.model.forward_chunk(ids, cache=loaded.cache, attn_params=params)["logits"]
    torch.cuda.synchronize()
    found: torch.Tensor = out.float().flatten(0, 1)
    return found


def errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return the relative error of each row: the length of the difference divided by the expected length."""
    assert found.isfinite().all()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()


def some_ids(engine: Any, streams: int, tokens: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(streams * 100 + tokens)
    return torch.randint(2, engine._loaded.model.config.vocab_size, (streams, tokens), generator=random)


def some_states(rows: int, seed: int) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((rows, 1, SHAPES["mixture"].hidden_size), generator=random, device="cuda").half()


def check_layers(engine: Any, rows: int) -> list[float]:
    """Compare what each layer adds to 20 inputs with what the PyTorch code adds. Returns the relative errors.

    With few experts, two close ones may both have large weights. So one row of twenty may be off by more than rounding.
    """
    off = []
    with torch.inference_mode():
        for layer in layers(engine):
            for seed in range(20):
                x = some_states(rows, seed)
                expected = (layer.forward_torch(x.clone()) - x).float().flatten(0, 1)
                found = (layer.forward(x.clone()) - x).float().flatten(0, 1)
                off += errors(found, expected)
    off.sort()
    print(f"rows {rows}: median {statistics.median(off):.4f}, worst {off[-3:]}")
    assert statistics.median(off) < 0.05
    assert off[len(off) * 19 // 20] < WRONG
    return off


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("as_streams", [True, False])
def test_logits_are_those_of_the_torch_code(rows: int, as_streams: bool, engine: Any) -> None:
    ids = some_ids(engine, rows, 1) if as_streams else some_ids(engine, 1, rows)
    with in_torch():
        expected = logits(engine, ids)
    off = errors(logits(engine, ids), expected)
    print(f"rows {rows}: {off}")
    assert max(off) < WRONG


@pytest.mark.parametrize("rows", ROWS)
def test_each_layer_computes_what_the_torch_code_does(rows: int, engine: Any) -> None:
    assert max(check_layers(engine, rows)) < WRONG


@pytest.mark.parametrize("rows", ROWS)
def test_both_ways_of_more_rows_are_right(rows: int, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing row by row and computing with the package's PyTorch code both agree, whatever ROW_BY_ROW is."""
    ids = some_ids(engine, rows, 1)
    with in_torch():
        expected = logits(engine, ids)
    for most in (1, 8):
        monkeypatch.setattr(mixture, "ROW_BY_ROW", most)
        assert max(errors(logits(engine, ids), expected)) < WRONG


@pytest.mark.parametrize("rows", ROWS)
def test_the_package_itself_skips_experts_of_2_to_4_rows(rows: int, engine: Any) -> None:
    """The package's own forward skips experts. If this test fails, the package has been corrected."""
    ids = some_ids(engine, rows, 1)
    with in_torch():
        expected = logits(engine, ids)
    with as_packaged():
        off = errors(logits(engine, ids), expected)
    print(f"rows {rows}: {off}")
    assert off[0] < WRONG, "row 0 has all its experts"
    assert [one > WRONG for one in off[1:]] == [rows <= 4] * (rows - 1)


@pytest.mark.parametrize("options", [{}, {"ngram_draft": True, "draft_tokens": 3}])
def test_a_whole_engine_never_fuses_more_than_one_row(options: dict[str, Any], tmp_path: Path) -> None:
    """The engine runs one to five concurrent answers, with prompts that end in chunks of one to four tokens."""
    engine = load(tmp_path, "exl2", **options)
    extension = importlib.import_module("exllamav2.moe_mlp").ext_c
    fused, rows = extension.q_moe_mlp_forward_, list[int]()

    def counted(handle: int, x: torch.Tensor) -> None:
        rows.append(len(x))
        fused(handle, x)

    with mock.patch.object(extension, "q_moe_mlp_forward_", counted):
        for streams in (1, 2, 3, 4, 5):
            engine.reset()
            driver = Driver(engine)
            for number in range(streams):
                driver.submit(some_ids(engine, 1, 257 + number)[0].tolist(), 12, min_new_tokens=12)
            driver.run()
    engine.close()
    assert set(rows) == {1}


@pytest.mark.parametrize("form", ["exl2", "gptq"])
@pytest.mark.parametrize("experts", [4, 8, 16])
def test_fewer_experts_are_fused_rightly(experts: int, form: str, tmp_path: Path) -> None:
    engine = load(tmp_path, form, experts)
    for rows in ROWS:
        check_layers(engine, rows)
    engine.close()


@pytest.mark.parametrize("experts", [4, 8, 16, 128])
def test_a_row_whose_routing_is_no_number_spares_the_others(experts: int, tmp_path: Path) -> None:
    """The kernels use index -1 for such a row (q_mlp_softmax.cuh), but in the memory of that row's thread only."""
    engine = load(tmp_path, "exl2", experts)
    layer = layers(engine)[0]
    with torch.inference_mode():
        x = some_states(4, 0)
        x[:, :, 0] = 0
        x[2, :, 0] = 1000.0
        layer.gate.linear.weight[:, 0] = 60000.0  # the logits of row 2 overflow, and no other row is affected
        expected = (layer.forward_torch(x.clone()) - x).float().flatten(0, 1)
        found = (layer.forward(x.clone()) - x).float().flatten(0, 1)
    others = [0, 1, 3]
    assert max(errors(found[others], expected[others])) < WRONG
    assert not found[2].isfinite().all()
    engine.close()
