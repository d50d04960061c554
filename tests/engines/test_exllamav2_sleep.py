"""A model of engine exllamav2 gives its GPU memory back, and answers afterwards as if it had never slept. Needs a CUDA
device."""

import gc
import importlib.util
from typing import Any

import pytest

from model_worker.engine import Engine, SleepingEngine
from model_worker.engines import build_engine
from tests.engines.conftest import demo_spec, need_gpu
from tests.engines.driver import Driver, Outcome, answer
from tools.demo_models.corpus import LETTERS_TEST_LONG_PROMPTS, LETTERS_TEST_PROMPTS

pytestmark = pytest.mark.gpu
MODES = ["FP16", "Q8", "Q6", "Q4"]


@pytest.fixture(autouse=True)
def _gpu() -> None:
    need_gpu("exllamav2")
    if importlib.util.find_spec("torch_memory_saver") is None:
        pytest.skip("the package torch_memory_saver is not installed")


def loaded(prepares: bool = False, **options: Any) -> SleepingEngine:
    options = {"cache_size": 8 * 2048, "chunk_size": 256, **options}
    engine = build_engine(demo_spec("exllamav2", "letters", sleep=True, prepare_sleep=prepares, options=options))
    engine.load(lambda *_: None)
    assert engine.capabilities.no_sleep == ""
    assert engine.capabilities.sleep_bytes
    return engine  # type: ignore[return-value]


def used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def answers(engine: Engine) -> list[str]:
    driver = Driver(engine)
    outcomes: list[Outcome] = [driver.submit(prompt) for prompt, _ in LETTERS_TEST_PROMPTS[:24]]
    driver.run()
    return [outcome.text for outcome in outcomes]


def nap(engine: SleepingEngine) -> None:
    engine.sleep(lambda: None)
    engine.wake(lambda: None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graphs", [True, False])
def test_answers_are_the_same_after_a_sleep(mode: str, graphs: bool) -> None:
    engine = loaded(cache_mode=mode, graphs=graphs)
    first = answers(engine)
    for _ in range(3):
        before = used()
        engine.sleep(lambda: None)
        assert before - used() > engine.capabilities.sleep_bytes, "weights and cache have left the GPU"
        assert engine.encode("abc")
        engine.wake(lambda: None)
        assert abs(used() - before) < 64 << 20
        assert answers(engine) == first
    assert first == [text for _, text in LETTERS_TEST_PROMPTS[:24]] or mode != "FP16"
    engine.close()


def test_it_is_prepared_in_parts() -> None:
    engine = loaded(prepares=True)
    first, parts = answers(engine), 1
    while engine.prepare_sleep():
        parts += 1
        assert parts < 100
    assert answers(engine) == first
    nap(engine)
    assert answers(engine) == first
    assert not engine.prepare_sleep()
    engine.close()
    other = loaded()
    assert not other.prepare_sleep(), "nobody has allowed it"
    other.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_sleeps_along(mode: str) -> None:
    engine = loaded(cache_mode=mode, sleep_cache=1 << 30)
    prompt, _ = LETTERS_TEST_LONG_PROMPTS[-1]
    first = answer(engine, prompt, 40)
    nap(engine)
    again = answer(engine, prompt, 40)
    assert again.finished is not None
    assert again.finished.cached_tokens >= 256
    assert again.text == first.text
    without = loaded(cache_mode=mode)
    answer(without, prompt, 40)
    nap(without)
    empty = answer(without, prompt, 40)
    assert empty.finished is not None
    assert empty.finished.cached_tokens == 0
    for each in (engine, without):
        each.close()


def test_no_garbage_is_collected_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a former engine has left may own memory of CUDA. Freeing it during a capture aborts the process."""
    import torch

    from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs

    collected: list[bool] = []
    run = DecodeGraphs._run

    def recorded(*arguments: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            collected.append(gc.isenabled())
        run(*arguments)

    monkeypatch.setattr(DecodeGraphs, "_run", recorded)
    assert gc.isenabled()
    loaded().close()
    assert collected
    assert not any(collected)
    assert gc.isenabled()


def test_many_sleeps_leave_nothing_behind() -> None:
    import psutil

    engine = loaded(prepares=True)
    while engine.prepare_sleep():
        pass
    first = answers(engine)

    def figures() -> tuple[int, int, int]:
        gc.collect()
        process = psutil.Process()
        return used(), process.memory_info().rss, process.num_fds()

    for _ in range(5):
        nap(engine)
    before = figures()
    for _ in range(100):
        nap(engine)
    after = figures()
    assert answers(engine) == first
    assert after[0] - before[0] < 4 << 20
    assert after[1] - before[1] < 32 << 20
    assert after[2] == before[2]
    engine.close()


def test_who_may_not_sleep_says_why() -> None:
    engine = build_engine(demo_spec("exllamav2", "letters"))
    engine.load(lambda *_: None)
    assert (engine.capabilities.sleep_bytes, engine.capabilities.no_sleep) == (
        None,
        "models.yaml does not let it sleep",
    )
    engine.close()
