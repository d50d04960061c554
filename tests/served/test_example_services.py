"""The two web services of ``examples/`` stream several answers of the shipped models at once."""

import http.client
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from urllib.parse import quote

import pytest

from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving, wait_until

pytestmark = pytest.mark.long

COMMANDS = {
    "fastapi": ("-m", "uvicorn", "--app-dir", "examples", "fastapi_service:app", "--port"),
    "flask": ("-m", "flask", "--app", "examples/flask_service.py", "run", "--port"),
}
DEMO = {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu", "max_batch_size": 32}


@contextmanager
def service(command: Sequence[str], environment: dict[str, str]) -> Iterator[int]:
    """Run a service, and yield its port when the service answers."""
    port = free_port()
    with subprocess.Popen([sys.executable, *command, str(port)], cwd=ROOT, env=environment) as process:
        try:
            wait_until(lambda: answers(port) or process.poll() is not None, what="the service")
            yield port
        finally:
            process.terminate()
            process.wait(WITHIN)


def answers(port: int) -> bool:
    try:
        ask(port, "/nothing")
    except OSError:
        return False
    return True


def ask(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"stories": DEMO}, wait=False) as serving:
        serving.wait_state("stories", "ready", within=90)  # importing torch can take long
        yield serving


@pytest.mark.parametrize("name", COMMANDS)
def test_a_service_streams_stories_to_several_readers(serving: Serving, name: str) -> None:
    environment = {**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)}
    with service(COMMANDS[name], environment) as port, ThreadPoolExecutor(4) as threads:
        names = ("Mia", "Søren", "Olga", "Åke")
        told = list(threads.map(lambda each: ask(port, f"/story?name={quote(each)}"), names))
        for each, (status, text) in zip(names, told, strict=True):
            assert status == 200
            assert text.startswith("Once upon a time")
            assert each in text
            assert text.rstrip().endswith(("The end.", "🦊"))
