"""The descriptions of the wire (``protocol.bodies``, ``protocol.verbs``) are complete, and the page shows them."""

from pathlib import Path
from typing import get_type_hints

from protocol import bodies
from protocol.bodies import APPEARS
from protocol.chat import QUESTIONS
from protocol.errors import ErrorCode
from protocol.messages import SUPERVISOR_TO_CLIENT, Kind
from protocol.values import hints_of
from protocol.verbs import VERBS
from tools.docs.wire import WIRE_PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
WITHOUT_KEYS = {Kind.EVENTS, Kind.PING, Kind.PONG}
"""Messages of the supervisor that contain no map, or maps that are described elsewhere."""


def test_the_page_holds_every_part() -> None:
    page = (DOCS / "wire-protocol.md").read_text()
    assert [name for name in WIRE_PARTS if f"<!-- part: {name} -->" not in page] == []


def test_the_maps_of_all_messages_are_described() -> None:
    described = {name.removesuffix("Body").upper() for name in vars(bodies) if name.endswith("Body")}
    assert described == {kind.name for kind in SUPERVISOR_TO_CLIENT - WITHOUT_KEYS} | {"HELLO"}


def test_the_parameters_of_questions_for_workers_are_described() -> None:
    for verb, model in QUESTIONS.items():
        assert get_type_hints(VERBS[verb].params).keys() == hints_of(model).keys() | {"model"}


def test_the_places_of_all_errors_are_described() -> None:
    assert set(APPEARS) == set(ErrorCode)
    assert all(APPEARS.values())
