"""The generated pages in the repository are up to date with their sources."""

from pathlib import Path

import pytest

from protocol.errors import RETRYABLE, ErrorCode
from tools.docs import pages
from tools.docs.errors import error_table
from tools.docs.request_options import engines_of, request_options, value_of


def test_committed_pages_are_up_to_date() -> None:
    assert pages.stale() == {}, "run `python -m tools.docs`, and commit what it writes"


def test_every_part_is_on_a_page_and_no_page_includes_another_file() -> None:
    assert pages.unused() == []
    assert [name for name in pages.handwritten() if "--8<--" in (pages.DOCS / name).read_text()] == []


def test_a_file_and_a_part_that_differ_are_named_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    monkeypatch.setattr(pages, "DOCS", docs)
    monkeypatch.setattr(pages, "FILES", {"one.md": lambda: "one\n", "images/two.svg": lambda: "two\n"})
    monkeypatch.setattr(pages, "PARTS", {"three": lambda: "3\n"})
    (docs / "one.md").write_text("one, as it was\n")
    (docs / "page.md").write_text("# A page\n\n<!-- part: three -->\nthree\n<!-- end: three -->\nmore\n")
    (tmp_path / "README.md").write_text("<!-- part: three -->\n3\n<!-- end: three -->\n")
    assert pages.main(["--check"]) == 1
    errors = capsys.readouterr().err
    for name in ("docs/one.md", "docs/images/two.svg", "docs/page.md"):
        assert f"{name} is out of date" in errors
    assert "README" not in errors
    assert pages.main([]) == 0
    assert (docs / "images/two.svg").read_text() == "two\n"
    assert (docs / "page.md").read_text() == "# A page\n\n<!-- part: three -->\n3\n<!-- end: three -->\nmore\n"
    assert pages.main(["--check"]) == 0
    assert pages.main(["--chekc"]) == 2


@pytest.mark.parametrize(
    "page",
    [
        "<!-- part: nothing -->\n<!-- end: nothing -->\n",
        "<!-- part: errors -->\n<!-- end: figures -->\n",
        "<!-- part: errors -->\n\nno end\n",
        "no beginning\n<!-- end: errors -->\n",
    ],
)
def test_a_part_that_is_unknown_or_has_no_end_is_an_error(page: str) -> None:
    with pytest.raises(ValueError, match="part"):
        pages.filled(page)


@pytest.mark.parametrize("code", ErrorCode, ids=lambda code: code.wire_name)
def test_each_error_code_has_a_row_with_a_remedy(code: ErrorCode) -> None:
    (row,) = [line for line in error_table().splitlines() if f'id="{code.wire_name}"' in line]
    number, _, happened, retryable, remedy = (cell.strip() for cell in row.strip("|").split("|"))
    assert int(number) == code
    assert (retryable == "yes") is (code in RETRYABLE)
    assert happened.endswith(".")
    assert remedy.endswith(".")


def test_options_of_a_request_name_engine_bounds_and_other_names() -> None:
    rows = {line.split("`")[1]: line for line in request_options().splitlines() if line.startswith("| <span")}
    assert "exllamav2" in rows["mirostat_tau"]
    assert "number from 0 to 10 " in rows["temperature"]
    assert "`rep_pen`" in rows["repetition_penalty"]
    keys = {line.split("`")[1]: line for line in request_options().splitlines() if line.startswith("* ")}
    assert "except `seed`." in keys["sampling"]
    assert "`max_tokens`" in keys["sampling"]
    assert "except `preset`." in keys["forced"]
    assert "`max_tokens`" in keys["limits"]
    assert "longer ends with `queue_timeout`" in rows["queue_ms"]
    assert engines_of("prompt") == engines_of("temperature") == "all"
    assert engines_of("top_a") == "exllamav2"
    assert engines_of("cfg_scale") == "exllamav2, without speculation"


def test_values_are_said_in_words() -> None:
    assert value_of({"enum": [0, 2], "type": "integer"}) == "`0` or `2`"
    assert value_of({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 9}, {"type": "null"}]}) == (
        "text of 1 to 9 characters"
    )
    assert value_of({"type": "number", "exclusiveMinimum": 0, "maximum": 1}) == "number above 0 to 1"
    assert value_of({"type": "array", "maxItems": 3, "items": {"type": "integer"}}) == "list of at most 3 token ids"
