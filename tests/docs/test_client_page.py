"""The page of the Python client has every public name, with signatures and docstrings from the source."""

import ast
import re
from enum import Enum

import pytest

import modelctl
from protocol.client.request_options import RequestOptions
from protocol.verbs import VERBS
from tools.docs import client, client_methods
from tools.docs.client import client_page
from tools.docs.request_options import request_options

OTHER_NAMES = re.compile(r"Other names: (.+?)\.")


def part(page: str, heading: str) -> str:
    level = heading.split()[0]
    return page.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def test_every_public_name_has_a_part_with_a_text() -> None:
    page = client_page()
    for name in {*modelctl.__all__} - {"__version__"}:
        text = part(page, f"### {name}")
        assert any(line and line[0].isupper() for line in text.splitlines()), name


def test_a_signature_has_types_as_written_and_values_of_defaults() -> None:
    page = client_page()
    generate = part(page, "#### `Client.generate()`")
    assert "    prompt: str | None = None,\n" in generate
    assert "    **options: Unpack[RequestOptions],\n" in generate
    assert "self" not in generate.partition("```")[2].partition("```")[0]
    assert "    silence: float = 15.0,\n" in part(page, "### Client")
    assert "| `finish_reason: str \\| None` | The reason" in part(page, "### Stream")
    assert "secret_key: str)" in part(page, "### ClientKey")
    assert "def call(verb: str, /, *, reply_timeout: float" in part(page, "#### `Client.call()`")


def test_every_keyword_of_generate_is_an_option_on_the_page_of_http() -> None:
    options = request_options()
    known = re.findall(r'id="option-(\w+)"', options) + re.findall(r"`(\w+)`", " ".join(OTHER_NAMES.findall(options)))
    assert {*RequestOptions.__annotations__} <= {*known}


def test_every_public_member_stands_on_the_page_once() -> None:
    page = client_page()
    for name in {*modelctl.__all__} - {"__version__"}:
        text = part(page, f"### {name}")
        kind = getattr(modelctl, client.TWINS.get(name, name))
        for member in [] if issubclass(kind, Enum) else [member for member, _ in client._members(kind)]:
            if name not in client.TWINS:
                places = rf"^(?:#### `{name}\.{member}\(\)`$|\| `{member}[(:])"
                assert len(re.findall(places, text, re.MULTILINE)) == 1, f"{name}.{member}"
    assert "Await `complete`, `embed`, `rerank`, `tokenize`," in part(page, "### AsyncClient")
    assert "Do not await `generate`, `choices`." in part(page, "### AsyncClient")
    assert "`connect() -> Self`" in part(page, "### AsyncClient"), "Client has no such method"


def test_a_method_that_sends_a_verb_leads_to_it() -> None:
    verbs = re.findall(r"^\| `(\w+)\(.*\(wire-protocol\.md#verb-(\w+)\) \|$", client_page(), re.MULTILINE)
    assert ("status", "status") in verbs
    assert {verb for _, verb in verbs} <= VERBS.keys()


def test_a_method_of_asyncio_that_takes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelctl.AsyncClient, "models", lambda self, more: None)
    with pytest.raises(ValueError, match=r"AsyncClient\.models"):
        client_page()


def test_what_a_class_inherits_from_a_public_class_stands_there_only() -> None:
    page = client_page()
    assert "Base class: [WireError](#wireerror)." in part(page, "### ConnectionLost")
    assert "`retryable: bool`" in part(page, "### WireError")
    assert "retryable" not in part(page, "### ConnectionLost")
    assert "| `text: str` |" in part(page, "### Stream"), "its base class is not public"


def test_a_name_that_the_page_does_not_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SECTIONS", {"Clients": ("Client",)})
    with pytest.raises(ValueError, match="AsyncClient"):
        client_page()


def test_a_public_member_without_a_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelctl.Stream.complete, "__doc__", None)
    with pytest.raises(ValueError, match=r"Stream\.complete"):
        client_page()


def test_the_methods_of_the_clients_send_what_their_verbs_take() -> None:
    tree = ast.parse((client_methods.CLIENTS / "sync_client.py").read_text())
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._ask"]
    assert len(asked) >= 10
    for call in asked:
        verb = VERBS[ast.literal_eval(call.args[0])]
        assert {keyword.arg for keyword in call.keywords} <= {*verb.known}
