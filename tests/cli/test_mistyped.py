"""The errors for unknown commands and options name those that were probably meant: click finds them."""

import json

import pytest

from tests.cli.programs import modelctl


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stauts", "No such command 'stauts'. (Did you mean one of: 'restart', 'start', 'status'?)"),
        ("lod letters", "No such command 'lod'. (Did you mean one of: 'load', 'reload', 'unload'?)"),
        ("keys nwe laptop", "No such command 'nwe'. Did you mean 'new'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        ("--verison", "No such option '--verison'. Did you mean '--version'?"),
        ("keys --hlep", "No such option '--hlep'. Did you mean '--help'?"),
        ("keys new laptop --htp", "No such option '--htp'. (Did you mean one of: '--help', '--http', '--rights'?)"),
        ("run letters --temprature=0 hi", "No such option '--temprature'. Did you mean '--temperature'?"),
        ("ps --xyzzy", "No such option '--xyzzy'."),
    ],
)
def test_the_name_that_was_meant_is_said(line: str, says: str) -> None:
    done = modelctl(*line.split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Error: {says}"
    done = modelctl(*line.split(), "--json")
    assert json.loads(done.stderr) == {"error": {"name": "usage", "message": says}}
