import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes says something about the machine, not about the code
settings.register_profile("protocol", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
settings.load_profile("protocol")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory whose path is short enough for sockets (pytest's own may not be)."""
    path = Path(tempfile.mkdtemp(prefix="modelctl-test-"))
    yield path
    shutil.rmtree(path)
