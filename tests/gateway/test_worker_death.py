"""When a worker dies in the middle of HTTP streams, the streams go on, and no token is missing or doubled."""

import http.client
import json
from contextlib import ExitStack, closing

from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

STREAMS = 16
TOKENS = 1000
"""Tokens of each stream: enough at 2 ms each that no stream is near its end when the worker is killed."""


def test_streams_survive_a_worker_that_is_killed() -> None:
    port = free_port()
    with (
        Serving({"m": engine(max_batch_size=STREAMS)}, gateway={"listen": port, "auth": "none"}) as serving,
        ExitStack() as connections,
    ):
        streams = []
        for i in range(STREAMS):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
            connections.enter_context(closing(connection))
            body = {"model": "m", "prompt": f"prompt {i}", "max_tokens": TOKENS, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            stream = connection.getresponse()
            streams.append((stream, stream.readline()))
        worker = serving.worker("m")
        worker.kill()
        for i, (stream, first) in enumerate(streams):
            events = (first + stream.read()).strip().split(b"\n\n")
            assert events[-1] == b"data: [DONE]"
            chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
            assert not [chunk for chunk in chunks if "error" in chunk]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer(f"prompt {i}", TOKENS)
        assert serving.worker("m").pid != worker.pid
