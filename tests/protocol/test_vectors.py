"""The test vectors, which clients in other languages can be checked with, hold for this implementation."""

import json
from typing import Any

import pytest

from protocol.codec import decode, encode
from protocol.errors import FrameError
from protocol.messages import (
    CLIENT_TO_SUPERVISOR,
    SUPERVISOR_TO_CLIENT,
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    Kind,
)
from tests.protocol.vector_format import VECTORS, load, to_fields, to_message

DIRECTIONS = {
    "client_to_supervisor": CLIENT_TO_SUPERVISOR,
    "supervisor_to_client": SUPERVISOR_TO_CLIENT,
    "supervisor_to_worker": SUPERVISOR_TO_WORKER,
    "worker_to_supervisor": WORKER_TO_SUPERVISOR,
}
VALID = [vector for direction in DIRECTIONS for vector in load(direction)]
MALFORMED = load("malformed")


def name(vector: dict[str, Any]) -> str:
    return f"{vector['direction']}-{vector['name']}"


@pytest.mark.parametrize("vector", VALID, ids=name)
def test_valid(vector: dict[str, Any]) -> None:
    kind = Kind[vector["kind"]]
    message = decode(bytes.fromhex(vector["hex"]), DIRECTIONS[vector["direction"]])
    assert message.kind is kind
    assert to_fields(message) == vector["fields"]
    assert to_message(kind, vector["fields"]) == message
    if vector.get("decode_only"):
        assert encode(message).hex() != vector["hex"], "the same as the shortest form: not worth a vector"
    else:
        assert encode(message).hex() == vector["hex"], "if the contract changed: python -m tests.protocol.vector_format"


def as_doubles(value: Any) -> Any:
    """Return the fields as a JSON reader sees them that reads every number as a double."""
    if isinstance(value, float):
        assert value.is_integer(), "a float without a mark"
        return int(value)
    if isinstance(value, dict):
        return value if "$f64" in value else {k: as_doubles(v) for k, v in value.items()}
    return [as_doubles(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_reader_whose_numbers_are_doubles_can_use_them(direction: str) -> None:
    text = (VECTORS / f"{direction}.json").read_text()
    for vector in json.loads(text, parse_int=float)["vectors"]:
        message = to_message(Kind[vector["kind"]], as_doubles(vector["fields"]))
        assert message == decode(bytes.fromhex(vector["hex"]), DIRECTIONS[direction]), vector["name"]


@pytest.mark.parametrize("vector", MALFORMED, ids=name)
def test_malformed(vector: dict[str, Any]) -> None:
    with pytest.raises(FrameError) as refused:
        decode(bytes.fromhex(vector["hex"]), DIRECTIONS[vector["direction"]])
    assert refused.value.code.wire_name == vector["error"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_kind_of_every_direction_is_covered(direction: str) -> None:
    assert {Kind[vector["kind"]] for vector in load(direction)} == DIRECTIONS[direction]
    assert all(vector["direction"] == direction for vector in load(direction))


def test_names_are_unique_and_every_file_explains_itself() -> None:
    names = [name(vector) for vector in VALID + MALFORMED]
    assert len(names) == len(set(names))
    files = {path.stem: json.loads(path.read_text()) for path in VECTORS.glob("*.json")}
    assert set(files) == {*DIRECTIONS, "malformed"}
    assert all(len(file["comment"]) > 80 for file in files.values())
