"""How the test vectors in protocol/vectors/ write messages down as JSON. Run as a module it fills in the hex."""

import json
from pathlib import Path
from typing import Any

from protocol import messages
from protocol.codec import encode, pack_body, pack_event, split_events, unpack_body, unpack_event
from protocol.messages import MESSAGE_CLASSES, EventEntry, Events, Kind, Message

VECTORS = Path(messages.__file__).with_name("vectors")


def load(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text())["vectors"]
    return vectors


def to_message(kind: Kind, fields: dict[str, Any]) -> Message:
    if kind is Kind.EVENTS:
        bodies = [pack_event(event["token_ids"], _from_json(event["map"])) for event in fields["events"]]
        index = [EventEntry(*entry) for entry in fields["index"]]
        return Events(fields["channel"], fields["generation"], index, b"".join(bodies))
    values: dict[str, Any] = {n: pack_body(_from_json(v)) if n == "body" else _from_json(v) for n, v in fields.items()}
    return MESSAGE_CLASSES[kind](**values)


def to_fields(message: Message) -> dict[str, Any]:
    if isinstance(message, Events):
        events = [unpack_event(entry, event) for entry, event in split_events(message)]
        return {
            "channel": message.channel,
            "generation": message.generation,
            "index": [list(entry) for entry in message.index],
            "events": [{"token_ids": list(ids), "map": _to_json(fields)} for ids, fields in events],
        }
    fields = {name: getattr(message, name) for name in type(message).__annotations__ if name != "kind"}
    return {n: _to_json(unpack_body(v) if n == "body" else v) for n, v in fields.items()}


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["$bin"]) if "$bin" in value else {k: _from_json(v) for k, v in value.items()}
    return [_from_json(v) for v in value] if isinstance(value, list) else value


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        return {k: _to_json(v) for k, v in value.items()}
    return [_to_json(v) for v in value] if isinstance(value, list) else value


def regenerate() -> None:
    for path in VECTORS.glob("*_to_*.json"):
        file = json.loads(path.read_text())
        for vector in file["vectors"]:
            fields = vector["fields"]
            events = fields["events"] if vector["kind"] == "EVENTS" else []
            for entry, event in zip(fields.get("index", []), events, strict=True):
                ids = event["token_ids"]
                entry[3:] = len(ids), len(pack_event(ids, _from_json(event["map"])))
            if not vector.get("decode_only"):
                vector["hex"] = encode(to_message(Kind[vector["kind"]], fields)).hex()
        lines = ",\n    ".join(json.dumps(vector, ensure_ascii=False) for vector in file["vectors"])
        comment = json.dumps(file["comment"], ensure_ascii=False)
        path.write_text(f'{{\n  "comment": {comment},\n  "vectors": [\n    {lines}\n  ]\n}}\n')


if __name__ == "__main__":
    regenerate()
