"""The page of the Python client has every public name, with signatures and docstrings from the source."""

import pytest

import modelctl
from tools.docs import client
from tools.docs.client import client_page


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
    assert "    messages: Sequence[dict[str, Any]] | None = None,\n" in generate
    assert "    top_k: int | None = None,\n" in generate
    assert "    **options: Unpack[RequestOptions]" in part(page, "#### `AsyncClient.generate()`")
    assert "self" not in generate.partition("```")[2].partition("```")[0]
    assert "| `temperature` | 0 always takes the likeliest token |" in generate
    assert "    silence: float = 15.0,\n" in part(page, "### Client")
    assert "async def complete(" in part(page, "#### `AsyncClient.complete()`")
    assert "finish_reason: str | None" in part(page, "#### `Stream.finish_reason`")
    assert "secret_key: str)" in part(page, "### ClientKey")
    assert "def call(verb: str, /, *, reply_timeout: float" in part(page, "#### `Client.call()`")


def test_what_a_class_inherits_from_a_public_class_stands_there_only() -> None:
    page = client_page()
    assert "Base class: [WireError](#wireerror)." in part(page, "### ConnectionLost")
    assert "#### `WireError.retryable`" in page
    assert "#### `ConnectionLost.retryable`" not in page
    assert "#### `AsyncStream.text`" in page, "its base class is not public"


def test_a_name_that_the_page_does_not_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SECTIONS", {"Clients": ("Client",)})
    with pytest.raises(ValueError, match="AsyncClient"):
        client_page()


def test_a_public_member_without_a_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelctl.Stream.complete, "__doc__", None)
    with pytest.raises(ValueError, match=r"Stream\.complete"):
        client_page()
