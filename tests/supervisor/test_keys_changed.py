"""Of a changed list of keys only what has changed is parsed, with the same result as a whole reading."""

import json
from collections.abc import Callable

import pytest

from supervisor.keys import records
from supervisor.keys.records import MAX_KEYS, KeysProblem, format_clients, parse_clients
from supervisor.keys.rights import Identity
from tests.supervisor.test_keys import entry


def listed(count: int) -> list[dict[str, object]]:
    return [entry(name=f"key-{i}", public_key=f"{i:040d}") for i in range(count)]


def test_of_a_changed_list_only_the_changed_entries_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    parse = records._identity
    monkeypatch.setattr(records, "_identity", lambda entry: (parsed.append(entry["name"]), parse(entry))[1])
    entries, known = listed(MAX_KEYS), dict[str, Identity]()
    assert parse_clients(format_clients(entries), known) == parse_clients(format_clients(entries))
    parsed.clear()
    parse_clients(format_clients(entries), known)
    assert parsed == []
    entries[7]["max_in_flight"] = 9
    del entries[3]
    entries.append(entry(name="new", public_key="n" * 40))
    found = parse_clients(format_clients(entries), known)
    assert parsed == ["key-7", "new"]
    assert found == parse_clients(format_clients(entries))
    assert len(known) == len(entries), "entries that are gone are forgotten"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("key-1", "key-0"),
        lambda text: text.replace(f"{1:040d}", f"{0:040d}"),
        lambda text: text.replace("key-1", "KEY"),
        lambda text: text.replace('"name": "key-1"', '"name": "key-1", "name": "key-9"'),
        lambda text: text.replace('"name": "key-1"', '"name": "key-1", "x": [{\n    },\n    {\n}]'),
        lambda text: text.replace('"name": "key-1",', '"name": "key-1"},{'),
        lambda text: text.replace('"name": "key-1",', ""),
        lambda text: text.replace("}\n  ]\n}\n", "}\n  ]\n}\n{}\n"),
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps(json.loads(text)),
        lambda text: (
            json.dumps({"clients": [*json.loads(text)["clients"], json.loads(text)["clients"][0]]}, indent=2) + "\n"
        ),
        lambda text: format_clients([]),
        lambda text: format_clients(listed(MAX_KEYS + 1)),
        lambda text: "",
        lambda text: "\x00",
    ],
)
def test_what_was_known_changes_no_result_and_no_error(change: Callable[[str], str]) -> None:
    good = format_clients(listed(3))
    known = dict[str, Identity]()
    parse_clients(good, known)

    def outcome(*more: dict[str, Identity]) -> object:
        try:
            return parse_clients(change(good), *more)
        except KeysProblem as e:
            return str(e)

    assert outcome(known) == outcome()
    assert parse_clients(good, known) == parse_clients(good)
