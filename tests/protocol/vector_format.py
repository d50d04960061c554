"""Read and write the test vectors in protocol/vectors/. Run as a module, it fills in the hex.

JSON has one kind of number, and many languages read it as a double. So a value that such a reader would change is
marked: {"$bin": hex} is a bin, {"$f64": number} is a float, and {"$u64": decimal digits} is an integer above 2**53 - 1.
Every number without a mark is an integer that a double holds exactly.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from protocol import messages
from protocol.codec import encode, pack_body, pack_event, split_events, unpack_body, unpack_event
from protocol.messages import MESSAGE_CLASSES, EventEntry, Events, Kind, Message

VECTORS = Path(messages.__file__).with_name("vectors")
EXACT = (1 << 53) - 1
"""The largest integer up to which a double holds every integer."""


def load(name: str) -> list[dict[str, Any]]:
    """Return the vectors of one file."""
    vectors: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["vectors"]
    return vectors


def to_message(kind: Kind, fields: dict[str, Any]) -> Message:
    """Return the message that a vector's ``fields`` describe."""
    values = from_json(fields)
    if kind is Kind.EVENTS:
        bodies = [pack_event(event["token_ids"], event["map"]) for event in values["events"]]
        index = [EventEntry(*entry) for entry in values["index"]]
        return Events(values["channel"], values["generation"], index, b"".join(bodies))
    arguments: dict[str, Any] = {n: pack_body(v) if n == "body" else v for n, v in values.items()}
    return MESSAGE_CLASSES[kind](**arguments)


def to_fields(message: Message) -> dict[str, Any]:
    """Return a message as the ``fields`` of a vector."""
    fields: dict[str, Any]
    if isinstance(message, Events):
        events = [unpack_event(entry, event) for entry, event in split_events(message)]
        fields = {
            "channel": message.channel,
            "generation": message.generation,
            "index": message.index,
            "events": [{"token_ids": ids, "map": fields} for ids, fields in events],
        }
    else:
        fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
        fields = {name: unpack_body(value) if name == "body" else value for name, value in fields.items()}
    marked: dict[str, Any] = to_json(fields)
    return marked


def from_json(value: Any) -> Any:
    """Return the value that this JSON stands for, with marks resolved."""
    if isinstance(value, list):
        return [from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$bin": digits}:
            return bytes.fromhex(digits)
        case {"$u64": digits}:
            return int(digits)
        case {"$f64": number}:
            return float(number)
    return {k: from_json(v) for k, v in value.items()}


def to_json(value: Any) -> Any:
    """Return the JSON that stands for a value, with marks."""
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, float):
        return {"$f64": value}
    if type(value) is int and value > EXACT:
        return {"$u64": str(value)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return [to_json(v) for v in value] if isinstance(value, list | tuple) else value


def regenerate() -> None:
    """Fill in the hex and the marks of every vector file."""
    for path in VECTORS.glob("*_to_*.json"):
        file = json.loads(path.read_text())
        for vector in file["vectors"]:
            fields = vector["fields"]
            events = fields["events"] if vector["kind"] == "EVENTS" else []
            for entry, event in zip(fields.get("index", []), events, strict=True):
                ids = event["token_ids"]
                entry[3:] = len(ids), len(pack_event(ids, from_json(event["map"])))
            if not vector.get("decode_only"):
                vector["hex"] = encode(to_message(Kind[vector["kind"]], fields)).hex()
            vector["fields"] = to_json(from_json(fields))  # marks what is not marked yet
        lines = ",\n    ".join(json.dumps(vector, ensure_ascii=False) for vector in file["vectors"])
        comment = json.dumps(file["comment"], ensure_ascii=False)
        path.write_text(f'{{\n  "comment": {comment},\n  "vectors": [\n    {lines}\n  ]\n}}\n')


if __name__ == "__main__":
    regenerate()
