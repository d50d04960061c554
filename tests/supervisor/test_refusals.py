"""Malformed frames of the test vectors are refused as the vectors say."""

from typing import Any

import pytest

from protocol.codec import decode, unpack_body
from protocol.errors import FrameError
from protocol.messages import CLIENT_TO_SUPERVISOR, Reply
from supervisor.requests.request import refusal
from tests.protocol.vector_format import load

FROM_CLIENTS = [vector for vector in load("malformed") if vector["direction"] == "client_to_supervisor"]


@pytest.mark.parametrize("vector", FROM_CLIENTS, ids=lambda vector: vector["name"])
def test_a_malformed_frame_of_a_client_is_answered(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as refused:
        decode(bytes.fromhex(vector["hex"]), CLIENT_TO_SUPERVISOR)
    answer = refusal(refused.value, refused.value.kind, refused.value.number, runs=False)
    body = unpack_body(answer.body)
    if isinstance(answer, Reply):
        assert (answer.call, body["error"]["name"]) == (vector["call"], vector["error"])
    else:
        assert (answer.request, body["name"]) == (vector.get("request", 0), vector["error"])
        assert body.get("refused") == vector.get("refused")
