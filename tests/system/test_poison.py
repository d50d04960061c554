"""After the death of a worker no stream waits for other answers, and a request that kills workers is found."""

import os
import signal

import pytest

from protocol.messages import Credit
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import Heard, RawClient
from tests.serving import engine

STREAMS = 32
WINDOW = 256
LONG, SHORT = 1000, 100


def all_have(client: RawClient, requests: range, tokens: int) -> None:
    while not all(client.heard.get(request, Heard()).tokens >= tokens for request in requests):
        client.receive()


def test_after_a_sigkill_all_streams_go_on_beside_each_other(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.005, max_batch_size=STREAMS)})
    requests = range(1, STREAMS + 1)
    with RawClient(serving.runtime_dir) as client:
        for request in requests:
            client.generate(request, "a", f"stream {request}", max_tokens=LONG)
            for _ in range(LONG // WINDOW):
                client.send(Credit(request, WINDOW))
        all_have(client, requests, 20)
        os.kill(serving.status("a")["pid"], signal.SIGKILL)
        while not all(2 in client.heard[request].generations for request in requests):
            client.receive()
            ended = [request for request in requests if client.heard[request].ends]
            assert not ended, "one stream had its whole answer, and another one none of its second worker's tokens"
        for request in requests:
            heard = client.heard[request]
            assert heard.text == answer(f"stream {request}", heard.tokens)


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 50])
def test_a_request_that_kills_among_many_is_found_by_three_deaths_and_nobody_else_fails(
    serve: Serve, place: int
) -> None:
    """With the default settings, the model must not be given up either."""
    serving = serve({"a": engine("KillsAtToken", step_s=0.005, max_batch_size=STREAMS)})
    innocent = range(1, STREAMS)
    with RawClient(serving.runtime_dir) as client:
        for request in innocent:
            client.generate(request, "a", f"stream {request}", max_tokens=SHORT)
        all_have(client, innocent, 5)
        client.generate(STREAMS, "a", f"kill {place} in each worker", max_tokens=SHORT)
        client.read_until_ended(*innocent, STREAMS)
        assert client.heard[STREAMS].ends == ["poisoned"]
        assert client.heard[STREAMS].tokens == place
        for request in innocent:
            heard = client.heard[request]
            assert (heard.text, heard.ends) == (answer(f"stream {request}", SHORT), ["length"])
    status = serving.wait_state("a", "ready")
    assert status["generation"] <= 4, "three deaths"


def test_a_death_that_finds_its_request_does_not_count_towards_giving_the_model_up(serve: Serve) -> None:
    serving = serve({"a": engine("KillsAtToken", step_s=0.005)}, restart={"limit": 4, "initial": "10ms"})
    with RawClient(serving.runtime_dir) as client:
        for request in (1, 2, 3):  # six deaths in all
            client.generate(request, "a", f"kill 0 {request}", max_tokens=SHORT)
            client.read_until_ended(request)
            assert client.heard[request].ends == ["poisoned"]
        client.generate(4, "a", "good", max_tokens=5)
        client.read_until_ended(4)
        assert client.heard[4].ends == ["length"]
        assert serving.status("a")["generation"] == 7
        assert "a request is to blame" in serving.log()
        client.generate(5, "a", "kill 0 5", max_tokens=SHORT)
        client.read_until_ended(5)
        assert client.heard[5].ends == ["worker_died"], "four deaths did count"
    assert serving.status("a")["state"] == "failed"
