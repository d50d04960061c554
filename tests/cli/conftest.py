import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import modelctl


@pytest.fixture
def away() -> Iterator[Path]:
    """Make a directory for a supervisor with the runtime directory ``r`` in it. After the test, end the supervisor."""
    directory = Path(tempfile.mkdtemp(prefix="mctl-", dir="/tmp"))  # tmp_path can be too long for a socket
    yield directory
    modelctl("shutdown", "--now", "--runtime-dir", directory / "r")
    shutil.rmtree(directory)
