"""Readers that stall cost no other reader of the same gateway anything."""

import http.client
import json
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from supervisor.requests.credit import SendBufferLimits
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

pytestmark = pytest.mark.long

STALLED = 100
ENDLESS = 1_000_000
TOKENS = 20_000


def stalled_reader(port: int, token: str) -> socket.socket:
    """Return a connection that has asked for an endless stream and does not read it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the kernel buffers little of the stream
    connection.connect(("127.0.0.1", port))
    body = json.dumps({"model": "stalled", "prompt": "x", "max_tokens": ENDLESS, "stream": True, "logprobs": 20})
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def test_a_hundred_stalled_readers_of_one_key_never_end_the_stream_of_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine it takes more than the usual minute until the key's limit is reached.
    monkeypatch.setenv("MODELCTL_SUPERVISOR__STALL", "10m")
    store, port = KeyStore(tmp_path / "keys"), free_port()
    bad, good = (store.add_token(name, parse_rights("infer")) for name in ("bad", "good"))
    models = {
        "stalled": engine(step_s=0, context=2 * ENDLESS, max_batch_size=STALLED),
        "good": engine(step_s=0, context=2 * TOKENS),
    }
    with Serving(models, gateway={"listen": port}, keys=tmp_path / "keys") as serving, ExitStack() as connections:
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["problem"] is None)
        for _ in range(STALLED):
            connections.callback(stalled_reader(port, bad).close)
        held = []

        def is_reached() -> bool:  # on a busy machine many more streams have ended a moment later
            held.append(serving.overview()["supervisor"]["held_bytes"])
            return bool(serving.status("stalled")["totals"]["errors"])

        wait_until(is_reached, 240, "the limit of the stalled readers' key")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
            body = {"model": "good", "prompt": "x", "max_tokens": TOKENS, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {good}"})
            lines = [line for line in connection.getresponse() if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        text = "".join(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] for line in lines[:-1])
        assert text == answer("x", TOKENS)
        assert 0.8 * SendBufferLimits.of_party < max(held)
        assert serving.overview()["supervisor"]["held_bytes"] <= 1.1 * SendBufferLimits.of_party
        assert serving.status("good")["totals"]["errors"] == 0
