"""Stop strings act in the text of an answer, and not in calls."""

import pytest

from model_worker.text import ContentStops

THINK = ("<think>", "</think>")


def delivered(text: str, size: int, *, opening: str = "", inside: bool = False) -> tuple[str, bool]:
    """Return (the text up to a stop, whether a stop string was found) of an answer that comes in pieces."""
    stops = ContentStops(THINK, inside, ["<tool_call>"], opening)
    stops.use(["STOP"])
    out = ""
    for at in range(0, len(text), size):
        told, found = stops.push(text[at : at + size])
        out += told
        if found:
            return out, True
    return out + stops.flush(), False


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "opening", "inside", "out", "found"),
    [
        ("a STOP b", "", False, "a ", True),
        ("a <tool_call>STOP", "", False, "a <tool_call>STOP", False),
        ("<think>STOP</think>a STOP b", "", False, "<think>STOP</think>a ", True),
        # A format whose calls may begin an answer without a marker
        ('{"x": "STOP"}', "{", False, '{"x": "STOP"}', False),
        ('\n {"x": "STOP"}', "{", False, '\n {"x": "STOP"}', False),
        ('so {"x": "STOP"}', "{", False, 'so {"x": "', True),
        ('STOP</think>\n{"x": "STOP"}', "{", True, 'STOP</think>\n{"x": "STOP"}', False),
        ('<think>STOP</think>\n{"x": "STOP"}', "{", False, '<think>STOP</think>\n{"x": "STOP"}', False),
        ('{"x": "STOP"}', "", False, '{"x": "', True),
    ],
)
def test_stop_strings_act_in_the_text(text: str, opening: str, inside: bool, out: str, found: bool, size: int) -> None:
    assert delivered(text, size, opening=opening, inside=inside) == (out, found)
