"""The package's fused function for mixtures of experts gets only rows that it computes correctly.

A stand-in replaces the fused function here. test_exllamav2_mixture_gpu.py tests the function itself.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.models import SHAPES, MixtureShape, write_model
from model_worker.engines.exllamav2 import load
from tests.engines.exllamav2_cpu.package import import_package

HANDLE = 7
MakeLayer = Callable[[int], "Layer"]


def read(file: str, offset: int, size: int, target: torch.Tensor) -> None:
    data = np.fromfile(file, np.uint8, size, offset=offset)
    target.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epsilon: float) -> None:
    full = x.float()
    out.copy_(full * (full.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight)


class Layer:
    """The package's mixture layer with plain weights on the CPU.

    calls  rows of each call of the fused function
    """

    def __init__(self, directory: Path) -> None:
        config = import_package().ExLlamaV2Config()
        config.model_dir = str(directory)
        config.prepare()
        model = import_package().ExLlamaV2(config)
        self.calls: list[int] = []
        self.package: Any = next(m for m in model.modules if type(m).__name__ == "ExLlamaV2MoEMLP")
        self.package.set_device_idx(-1)
        self.package.load()
        self.package.q_handle = HANDLE

    def fused(self, handle: int, rows: torch.Tensor) -> None:
        """Compute in place like QMoEMLP::forward_ in cuda/q_mlp.cu. Raise where it skips experts or reads too far."""
        assert handle == HANDLE
        self.calls.append(len(rows))
        assert len(rows) <= 4, "the kernels keep the weights of 4 rows"
        assert len(rows) == 1 or self.package.num_experts != 128, "experts that row 0 did not choose are skipped"
        rows.copy_(self.package.forward_torch(rows[None])[0])


@pytest.fixture
def make_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLayer]:
    import_package()
    extension = sys.modules["exllamav2_ext"]
    monkeypatch.setattr(extension, "stloader_read", read, raising=False)
    monkeypatch.setattr(extension, "rms_norm", rms_norm, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make(experts: int) -> Layer:
        shape = SHAPES["mixture"]
        assert isinstance(shape, MixtureShape)
        chosen = min(shape.num_experts_per_tok, experts // 2)
        small = replace(
            shape, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1, vocab_size=320, num_experts=experts,
            num_experts_per_tok=chosen,
        )  # fmt: skip
        write_model(tmp_path / str(experts), small, std=0.1)
        layer = Layer(tmp_path / str(experts))
        monkeypatch.setattr(extension, "q_moe_mlp_forward_", layer.fused, raising=False)
        return layer

    yield make
    sys.modules["exllamav2.stloader"].global_stfiles.clear()  # type: ignore[attr-defined]


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package's module as it was before any model was loaded."""
    import_package()
    module: Any = sys.modules["exllamav2.moe_mlp"]
    if hasattr(module, "modelctl_original"):
        monkeypatch.setattr(module.ExLlamaV2MoEMLP, "forward", module.modelctl_original)
        monkeypatch.delattr(module, "modelctl_original")
    monkeypatch.setattr(module.ExLlamaV2MoEMLP, "forward", module.ExLlamaV2MoEMLP.forward)  # put back at the end
    yield module
    vars(module).pop("modelctl_original", None)


def states(streams: int, tokens: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(streams * 100 + tokens)
    return torch.randn((streams, tokens, 64), generator=random).half()


SHAPES_OF_STEPS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (5, 1), (1, 8), (2, 5), (1, 64)]
"""(streams, tokens of each stream)"""


@pytest.mark.long
@pytest.mark.parametrize(("streams", "tokens"), SHAPES_OF_STEPS)
def test_128_experts_are_never_fused_for_more_than_one_row(
    streams: int, tokens: int, make_layer: MakeLayer, original: Any
) -> None:
    load.keep_rows_apart()
    load.keep_rows_apart()
    layer, given = make_layer(128), states(streams, tokens)
    expected = layer.package.forward_torch(given.clone())
    found = layer.package.forward(given.clone(), cache=None, attn_params=None, past_len=0, loras=None)
    assert set(layer.calls) <= {1}
    assert len(layer.calls) == (streams * tokens if streams * tokens <= load.ROW_BY_ROW else 0)
    assert found.shape == given.shape
    assert torch.allclose(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert not torch.allclose(found.float(), given.float(), atol=0.1), "the experts of this test add nothing"


@pytest.mark.parametrize("experts", [4, 8, 16])
def test_fewer_experts_are_fused_as_the_package_does_it(experts: int, make_layer: MakeLayer, original: Any) -> None:
    load.keep_rows_apart()
    layer = make_layer(experts)
    for rows in (1, 2, 3, 4, 5):
        layer.package.forward(states(rows, 1))
    assert layer.calls == [1, 2, 3, 4]


def test_what_the_package_never_fuses_stays_as_it_is(make_layer: MakeLayer, original: Any) -> None:
    load.keep_rows_apart()
    layer, given = make_layer(128), states(1, 3)
    expected = layer.package.forward_torch(given)
    assert torch.equal(layer.package.forward(given, intermediates=True)["hidden_states"], expected)
    assert torch.equal(layer.package.forward(given, loras=["an adapter"]), expected)
    layer.package.q_handle = None
    assert torch.equal(layer.package.forward(given), expected)
    assert layer.calls == []


def test_the_package_itself_fuses_128_experts_wrongly(make_layer: MakeLayer, original: Any) -> None:
    """The package's own forward skips experts. If this test fails, the package has been corrected."""
    layer = make_layer(128)
    with pytest.raises(AssertionError, match="are skipped"):
        layer.package.forward(states(2, 1))
