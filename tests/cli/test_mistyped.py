"""The errors for unknown commands and options name those that were probably meant, and have the same wording."""

import json

import pytest

from tests.cli.programs import modelctl


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stauts", "unknown command 'stauts'; did you mean 'status'?"),
        ("lod letters", "unknown command 'lod'; did you mean 'load'?"),
        ("keys nwe laptop", "unknown command 'nwe'; did you mean 'new'?"),
        ("xyzzy", "unknown command 'xyzzy'"),
        ("--verison", "unknown option '--verison'; did you mean '--version'?"),
        ("keys --hlep", "unknown option '--hlep'; did you mean '--help'?"),
        ("keys new laptop --htp", "unknown option '--htp'; did you mean '--http'?"),
        ("run letters --temprature=0 hi", "unknown option '--temprature'; did you mean '--temperature'?"),
        ("ps --xyzzy", "unknown option '--xyzzy'"),
        ("serve --no-compil", "unknown option '--no-compil'"),  # that option is hidden
        ("run --modle letters hi", "unknown option '--modle'; MODEL is an argument: give it without a name"),
    ],
)
def test_the_name_that_was_meant_is_said(line: str, says: str) -> None:
    done = modelctl(*line.split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Error: {says}"
    done = modelctl(*line.split(), "--json")
    assert json.loads(done.stderr) == {"error": {"name": "usage", "message": says}}
