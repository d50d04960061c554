"""Two models on ExLlamaV2, pinned to a GPU, work end to end. Needs a CUDA device: ``pytest -m gpu tests/served``."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving import Serving, wait_until
from tools.demo_models import corpus

pytestmark = pytest.mark.gpu
LONG_PROMPT, LONG_ANSWER = corpus.LETTERS_TEST_LONG_ANSWERS[0]


def gpu_memory_by_pid() -> dict[int, int]:
    """Return the bytes that each process holds on the GPUs, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    used: dict[int, int] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index)):
            used[process.pid] = used.get(process.pid, 0) + (process.usedGpuMemory or 0)
    return used


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("exllamav2 served: no CUDA device is visible")
    if importlib.util.find_spec("exllamav2") is None:
        pytest.skip("exllamav2 served: the package is not installed")
    models = {
        name: {"model_dir": f"demo:{name}", "gpu": 0, "max_batch_size": 16, "cache_size": 16 * 2048}
        for name in ("letters", "stories")
    }
    with Serving(models, wait=False) as serving:
        for name in models:
            status = serving.wait_state(name, "ready", within=110)
            print(f"{name}: {status['device']}; {status['attention']}; loaded in {status['load_seconds']} s")
        yield serving


def ask(serving: Serving, model: str, prompt: str) -> str:
    with serving.client() as client:
        return client.complete(model, prompt, temperature=0, max_tokens=1000).text


def test_concurrent_streams_of_two_models_answer_their_own_questions(serving: Serving) -> None:
    questions = [("letters", *pair) for pair in corpus.LETTERS_TEST_PROMPTS[:24]]
    questions += [("stories", *pair) for pair in corpus.TEST_PROMPTS["stories"][:24]]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda q: ask(serving, q[0], q[1]), questions))
    assert answers == [answer for _, _, answer in questions]
    for model in ("letters", "stories"):
        serving.wait_idle(model)


def test_a_cancelled_stream_leaves_the_gpu(serving: Serving) -> None:
    with serving.client() as client:
        stream = client.generate("letters", LONG_PROMPT, temperature=0)
        next(stream)
        stream.cancel()
        for _ in stream:
            pass
        assert stream.finish_reason == "cancelled"
        serving.wait_idle("letters")


def test_a_killed_worker_gives_its_memory_back_and_comes_back(serving: Serving) -> None:
    status = serving.status("stories")
    with serving.client() as client:
        other = client.generate("letters", LONG_PROMPT, temperature=0)
        doomed = client.generate("stories", corpus.TEST_PROMPTS["stories"][0][0], temperature=0)
        parts = [next(other).text]
        next(doomed)
        os.kill(status["pid"], signal.SIGKILL)
        parts += [delta.text for delta in other]
        assert "".join(parts) == LONG_ANSWER
        assert doomed.complete().text == corpus.TEST_PROMPTS["stories"][0][1], "it went on where it was"
    serving.wait_state("stories", "ready")
    prompt, answer = corpus.TEST_PROMPTS["stories"][1]
    assert ask(serving, "stories", prompt) == answer


def test_stop_gives_the_gpu_memory_back(serving: Serving) -> None:
    """The test looks only at the model's own process, since other processes may come and go on the GPU."""
    pid = serving.status("stories")["pid"]
    before = gpu_memory_by_pid()
    print(f"held on the GPU: {before}")
    assert before[pid] > 0
    assert serving.modelctl("stop", "stories", timeout=60).returncode == 0
    wait_until(lambda: pid not in gpu_memory_by_pid(), 5, "the model's memory to be given back")
    print(f"after modelctl stop stories: {gpu_memory_by_pid()}")
