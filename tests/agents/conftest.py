"""Fixtures of the tests with other people's programs. Each module has a supervisor of its own: ``serving``."""

from pathlib import Path

import pytest

from tests.agents.harness import Place
from tests.keyed import free_port
from tests.serving import Serving


@pytest.fixture(scope="module")
def port() -> int:
    """Return the port of the gateway of ``serving``."""
    return free_port()


@pytest.fixture
def place(serving: Serving, port: int, tmp_path: Path) -> Place:
    """Return the place in which a program runs, beside the gateway."""
    return Place(tmp_path, port)
