"""Fixtures with engines, each loaded once a session. ``-m gpu`` runs the tests on engines that need a CUDA device."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_worker.engine import Engine
from model_worker.engines import build_engine
from protocol.process.worker_spec import EngineSpec
from tests.engines.synthetic_model import write_llama
from tools.demo_models import directory

ENGINES = [
    "transformers",
    pytest.param("transformers-cuda", marks=pytest.mark.gpu),
    pytest.param("exllamav2", marks=pytest.mark.gpu),
]


def demo_spec(engine: str, model: str, **changes: Any) -> EngineSpec:
    """Return the spec of a demo model with a batch size of 8 and chunks of 256 tokens."""
    options: dict[str, Any] = {"chunk_size": 256}
    if engine == "exllamav2":
        options |= {"cache_size": 8 * 2048}
    device = "cpu" if engine == "transformers" else "cuda"
    name = engine.removesuffix("-cuda")
    fields: dict[str, Any] = {"device": device, "max_batch_size": 8, "options": options} | changes
    return EngineSpec(model, name, str(directory(model)), **fields)


def need_gpu(engine: str) -> None:
    """Skip the test with a reason if the engine cannot run here."""
    if engine == "transformers":
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"{engine}: no CUDA device is visible")
    if engine == "exllamav2" and importlib.util.find_spec("exllamav2") is None:
        pytest.skip("exllamav2: the package is not installed")


@pytest.fixture(scope="session")
def load() -> Iterator[Callable[[str, str], Engine]]:
    """Return a function that loads a demo model on an engine, once for each pair of both."""
    loaded: dict[tuple[str, str], Engine] = {}

    def get(engine: str, model: str) -> Engine:
        need_gpu(engine)
        if (engine, model) not in loaded:
            built = build_engine(demo_spec(engine, model))
            built.load(lambda *_: None)
            loaded[engine, model] = built
        return loaded[engine, model]

    yield get
    for engine in loaded.values():
        engine.close()


@pytest.fixture(params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    need_gpu(name)
    return name


@pytest.fixture
def letters(load: Callable[[str, str], Engine], engine_name: str) -> Iterator[Engine]:
    engine = load(engine_name, "letters")
    engine.reset()
    yield engine
    engine.reset()


@pytest.fixture
def stories(load: Callable[[str, str], Engine], engine_name: str) -> Iterator[Engine]:
    engine = load(engine_name, "stories")
    engine.reset()
    yield engine
    engine.reset()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model of the Llama architecture with few weights. Return its directory."""
    write_llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=["package's loop", "queued ahead"])
def decoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have engines of ``exllamav2_cpu.harness`` decode with the package's loop, and with the one that queues steps
    ahead. Return which."""
    from tests.engines.exllamav2_cpu.harness import Harness

    way: str = request.param
    monkeypatch.setattr(Harness, "queues_ahead", way == "queued ahead")
    return way
