"""Docstrings of the source are converted to Markdown correctly."""

from enum import IntEnum

import pytest

from protocol.attribute_docs import attribute_docs
from tools.docs.docstrings import render
from tools.docs.outside import outside


class Base:
    """Not an attribute's."""

    first: int = 1
    """The first,
    in two lines."""
    second: int = 2

    def method(self) -> None:
        """Not an attribute's, either."""


class Derived(Base):
    third: int = 3
    """The third."""


class Code(IntEnum):
    ONE = 1
    """A member's."""


def test_texts_below_attributes_are_found_and_inherited() -> None:
    docs = attribute_docs(Derived)
    assert docs["first"] == "The first,\nin two lines."
    assert docs["third"] == "The third."
    assert "second" not in docs
    assert "method" not in docs
    assert dict(attribute_docs(Code)) == {"ONE": "A member's."}


def test_columns_become_a_table_and_indented_lines_code() -> None:
    made = render("""Do it.

        print("so")

    These say how:
    name           what ``it`` is called
    least, most    bounds, which may take
                   two lines

    Raises nothing.
    """)
    assert made == (
        'Do it.\n\n```python\nprint("so")\n```\n\nThese say how:\n\n'
        "| name | meaning |\n|---|---|\n| `name` | what `it` is called |\n"
        "| `least`, `most` | bounds, which may take two lines |\n\nRaises nothing."
    )


def test_a_line_that_belongs_to_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="'and this'"):
        render("name    meaning\nand this")


def test_what_a_browser_would_fetch_from_elsewhere_is_found() -> None:
    assert outside('<img src="pictures/a.svg"><a href="https://example.org">x</a><script>1</script>') == []
    assert outside('<script src="https://example.org/x.js"></script>') == ["https://example.org/x.js"]
    assert outside('<link rel="stylesheet" href="//example.org/x.css">') == ["//example.org/x.css"]
    assert outside('<link rel="canonical" href="https://example.org/">') == []
    assert "SVG" in outside('<pre class="mermaid"><code>graph</code></pre>')[0]
